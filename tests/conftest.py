"""What must happen before any test module imports torch."""

from __future__ import annotations

from engine.numerics import prepare_environment

prepare_environment()
