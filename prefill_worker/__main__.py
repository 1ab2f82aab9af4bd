"""``python -m prefill_worker --config F``: a prefill worker by hand, without Ray."""

from engine.numerics import prepare_environment

prepare_environment()

from common.process import main  # noqa: E402
from prefill_worker.process import run_prefill_worker  # noqa: E402

if __name__ == "__main__":
    main("prefill_worker", "prefill", run_prefill_worker)
