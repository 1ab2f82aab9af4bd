"""`baton bench load`: load on any OpenAI-compatible URL, and what its streams were like.

    workload.py    which requests, when; `trace.py` reads them from a trace, `prompts.py` writes their text
    target.py      what the server is: its model, the fields it takes, how it counts tokens
    driver.py      sends them, in open or closed loop
    connection.py  HTTP/1.1 and server-sent events; `events.py` finds the events, `stream.py` takes their times
    figures.py     the numbers, and their definitions; `summary.py` and `plots.py` show them
    session.py     all of it, in order; `self_test.py` measures what the generator itself costs

Knows nothing of Baton's insides: what it says of Baton it could say of any other server.
"""
