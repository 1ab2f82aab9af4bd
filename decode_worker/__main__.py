"""``python -m decode_worker --config F``: a decode worker by hand, without Ray."""

from engine.numerics import prepare_environment

prepare_environment()

from common.process import main  # noqa: E402
from decode_worker.process import run_decode_worker  # noqa: E402

if __name__ == "__main__":
    main("decode_worker", "decode", run_decode_worker)
