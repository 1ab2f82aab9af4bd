"""`baton bench transfer` from its flags to its files, with a real peer process."""

from __future__ import annotations

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from bench.transfer.cases import KIB, MIB
from bench.transfer.session import TransferOptions, run_transfer
from cluster.cli import main
from common.errors import BatonError
from tests.cluster.terminal import CTRL_C, Terminal

PNG_MAGIC = b"\x89PNG\r\n\x1a\n"


def peers_of(pid: int) -> list[psutil.Process]:
    return [child for child in psutil.Process(pid).children() if "bench.transfer.peer" in child.cmdline()]


@pytest.mark.e2e
def test_a_small_run_from_flags_to_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, plot = tmp_path / "out.json", tmp_path / "plot.png"
    flags = ["--transports", "shm,tcp", "--sizes", "64KiB,16MiB", "--blocks", "1,16,10000", "--rounds", "1"]
    flags += ["--only", "speed", "--peers", "off", "--json", str(out), "--plot", str(plot)]
    assert main(["bench", "transfer", *flags]) == 0
    figures = json.loads(out.read_text())
    assert figures.keys() >= {"results", "overlap", "checksum_share"}
    for result in figures["results"]:
        assert result.keys() >= {"transport", "bytes", "blocks", "gib_s", "raw_gib_s", "ratio"}
        assert result["ratio"] == pytest.approx(result["gib_s"] / result["raw_gib_s"])
    cases = [(65536, 1), (65536, 16), (16777216, 1), (16777216, 16), (16800000, 10000)]
    measured = [(each["transport"], each["bytes"], each["blocks"]) for each in figures["results"]]
    assert measured == [(name, *case) for name in ("shm", "tcp") for case in cases]
    assert figures["checksum_share"] == max(figures["checksum_shares"].values()) < 1
    assert figures["overlap"] == []
    assert plot.read_bytes().startswith(PNG_MAGIC)
    said = capsys.readouterr()
    assert len([line for line in said.err.splitlines() if " ratio " in line]) == 10
    assert "targets," in said.out
    assert peers_of(os.getpid()) == []


@pytest.mark.e2e
def test_ctrl_c_ends_it_and_its_peer() -> None:
    flags = ["--transports", "tcp", "--sizes", "1MiB,16MiB", "--blocks", "16", "--rounds", "100"]
    terminal = Terminal("bench", "transfer", *flags)
    try:
        terminal.expect("ratio", within_s=30)
        peers = peers_of(terminal.process.pid)
        terminal.type(CTRL_C)
        assert terminal.exit_status() == 130
        assert "Traceback" not in terminal.seen
        assert len(peers) == 1
        assert not peers[0].is_running()
    finally:
        terminal.close()


@pytest.mark.e2e
def test_a_peer_that_dies_ends_it_with_a_word_and_leaves_nothing() -> None:
    """Killed while bytes go over the ring of shared memory, or the engine."""
    killers: list[threading.Timer] = []

    def kill_soon(_: str) -> None:
        (peer,) = peers_of(os.getpid())
        killers.append(threading.Timer(0.1, peer.send_signal, [signal.SIGKILL]))
        killers[-1].start()

    options = TransferOptions(("shm",), sizes=(MIB, 64 * MIB), blocks=(16,), rounds=20, only="speed")
    with pytest.raises(BatonError, match=r"the benchmark's peer process ended \(exit code -9\)"):
        run_transfer(options, kill_soon)
    assert len(killers) == 1
    assert peers_of(os.getpid()) == []


@pytest.mark.e2e
def test_a_benchmark_that_is_killed_takes_its_peer_along() -> None:
    flags = ["--transports", "shm", "--sizes", "64KiB,16MiB", "--blocks", "16", "--rounds", "100"]
    terminal = Terminal("bench", "transfer", *flags)
    try:
        terminal.expect("ratio", within_s=30)
        peers = peers_of(terminal.process.pid)
        terminal.process.kill()
        gone, alive = psutil.wait_procs(peers, timeout=20)
        assert (len(gone), alive) == (1, [])
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--sizes", "64KB"], "must be bytes, such as 4096, 64KiB"),
        (["--sizes", "0"], "whole number of bytes"),
        (["--sizes", "0.3KiB"], "whole number of bytes"),
        (["--sizes", "1MiB,,2MiB"], "must be a list"),
        (["--blocks", "0"], "must be 1 or more"),
        (["--blocks", "many"], "--blocks"),
        (["--rounds", "0"], "must be 1 or more"),
        (["--peers", "some"], "--peers"),
        (["--only", "all"], "--only"),
        (["--only", "overlap", "--no-overlap"], "not allowed with"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["bench", "transfer", *flags])
    assert end.value.code == 2
    error = capsys.readouterr().err
    assert flags[0] in error
    assert said in error


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--transports", "carrier-pigeon"], "transport 'carrier-pigeon' is none that this benchmark knows; usable"),
        (["--transports", "shm,nccl"], "transport 'nccl' is none that this benchmark knows; usable here: local, shm"),
        (["--sizes", "64KiB", "--blocks", "10000"], "65536 in 10000 blocks has 4"),
        (["--sizes", "900000GiB", "--blocks", "1000000000"], "too little memory"),
        (["--json", "/nowhere/at/all.json"], "there is no folder /nowhere/at"),
        (["--set", "transfer.lease=1"], "lease"),
    ],
)
def test_what_cannot_be_measured_is_said_at_once(
    flags: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "transfer", *flags]) == 1
    assert said in capsys.readouterr().err


def test_a_transport_that_does_not_work_here_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("bench.transfer.session.host_id", lambda: "")
    assert main(["bench", "transfer", "--transports", "shm"]) == 1
    assert "transport 'shm' cannot be used on this machine; usable here: local, gloo" in capsys.readouterr().err


def test_sizes_are_read_as_they_are_written() -> None:
    from cluster.commands.flags import num_bytes

    assert num_bytes("64KiB") == num_bytes("64 kib") == num_bytes("65536") == num_bytes("65536B") == 64 * KIB
    assert num_bytes("1.5MiB") == 1_572_864
