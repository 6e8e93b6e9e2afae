"""Every backend keeps what was logged, and after a resume shows the run that was never killed."""

import io
import json
import math

import pytest

from jaxrl.config import LogConfig
from jaxrl.metrics import cut, jsonl, make_trackers, names, tensorboard
from jaxrl.metrics.plain import PlainTracker


def scalars(folder):
    """(step, name) -> value over all event files of a folder, in order."""
    events = [e for path in sorted(folder.glob("events*")) for e in tensorboard.read(path)]
    return [(e.step, v.tag, v.simple_value) for e in events for v in e.summary.value]


def test_a_line_is_on_disk_when_log_returns(tmp_path):
    tracker = jsonl.JsonlTracker(tmp_path / "deep" / "metrics.jsonl")
    tracker.log(1, {"loss": 0.5, "bad": math.nan, "worse": -math.inf})
    (line,) = map(json.loads, (tmp_path / "deep" / "metrics.jsonl").read_text().splitlines())
    assert line.pop("time") > 1e9
    assert line == {"step": 1, "loss": 0.5, "bad": None, "worse": None}


def test_a_full_disk_is_an_error_that_names_the_file():
    tracker = jsonl.JsonlTracker("/dev/full")
    with pytest.raises(OSError, match="No space left on device: '/dev/full'"):
        tracker.log(1, {"loss": 0.5})


def test_cut_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    cut(path, 3)  # not there: nothing to do
    lines = [b'{"step": 0}\n', b'{"step": 1, "a": 1}\n', b'{"step": 1, "b": 2}\n', b'{"step": 2}\n', b'{"step": 3}\n']
    for torn in (b"", b'{"st', b'{"step": 3}', b"\0\0\0\0\n"):
        for step in range(4):
            path.write_bytes(b"".join(lines) + torn)
            cut(path, step)
            assert path.read_bytes() == b"".join(line for line in lines if json.loads(line)["step"] <= step)
    path.write_bytes(b"")
    cut(path, 0)
    assert path.read_bytes() == b""


def test_tensorboard_cut_drops_later_steps_and_a_torn_event(tmp_path):
    first = tensorboard.TensorBoardTracker(tmp_path, 0)
    for step in range(1, 6):
        first.log(step, {"reward/mean": step / 8, "loss": -step})
    (path,) = tmp_path.glob("events*")
    with open(path, "ab") as file:  # never closed: as a kill leaves it
        file.write(b"\x20\0\0\0\0\0\0\0torn")
    second = tensorboard.TensorBoardTracker(tmp_path, 3)
    second.log(4, {"reward/mean": 0.75})
    second.close()
    expected = [(s, n, v) for s in range(1, 4) for n, v in (("reward/mean", s / 8), ("loss", -s))]
    assert scalars(tmp_path) == expected + [(4, "reward/mean", 0.75)]
    marker = [e for e in tensorboard.read(sorted(tmp_path.glob("events*"))[1]) if e.HasField("session_log")]
    assert [e.step for e in marker] == [4]


def test_event_files_follow_the_record_format(tmp_path):
    """Against the checksums of the format, computed bit by bit."""
    tracker = tensorboard.TensorBoardTracker(tmp_path, 0)
    tracker.log(1, {"loss": 2.5})
    tracker.close()
    (path,) = tmp_path.glob("events*")
    data, offset, count = path.read_bytes(), 0, 0
    while offset < len(data):
        length = int.from_bytes(data[offset : offset + 8], "little")
        assert _masked_crc32c(data[offset : offset + 8]) == int.from_bytes(data[offset + 8 : offset + 12], "little")
        body = data[offset + 12 : offset + 12 + length]
        assert _masked_crc32c(body) == int.from_bytes(data[offset + 12 + length : offset + 16 + length], "little")
        offset, count = offset + 16 + length, count + 1
    assert count == 3


def _masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def test_a_resumed_run_reads_like_one_that_was_not_killed(tmp_path, capsys):
    trackers = make_trackers(LogConfig(), tmp_path / "run", -1, 6)
    for step in range(1, 5):
        trackers.log(step, {names.REWARD: step / 8})
    trackers = make_trackers(LogConfig(), tmp_path / "run", 2, 6)  # the checkpoint is older than the log
    for step in range(3, 7):
        trackers.log(step, {names.REWARD: -step / 8})
    trackers.close()
    rewards = [(line["step"], line[names.REWARD]) for line in jsonl.read(tmp_path / "run" / "metrics.jsonl")]
    assert rewards == [(s, s / 8 if s < 3 else -s / 8) for s in range(1, 7)]
    assert [(step, value) for step, _, value in scalars(tmp_path / "run" / "tensorboard")] == rewards
    assert len(capsys.readouterr().out.splitlines()) == 8  # no terminal: plain lines


def test_a_run_killed_before_its_first_checkpoint_begins_anew(tmp_path):
    for _ in range(2):
        trackers = make_trackers(LogConfig(), tmp_path, -1, 6)
        trackers.log(0, {names.HELDOUT: 0.5})
        trackers.log(1, {names.REWARD: 0.25})
        trackers.close()
    assert [line["step"] for line in jsonl.read(tmp_path / "metrics.jsonl")] == [0, 1]
    assert [step for step, _, _ in scalars(tmp_path / "tensorboard")] == [0, 1]


def test_without_tensorboard_there_is_no_folder(tmp_path):
    make_trackers(LogConfig(tensorboard=False), tmp_path, -1, 1).close()
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_plain_lines_say_what_a_person_watches():
    now, out = [0.0], io.StringIO()
    tracker = PlainTracker(10, 100, out, lambda: now[0])
    for step in range(11, 14):
        now[0] += 40
        tracker.log(step, {names.REWARD: 0.25, names.PARITY: 3e-6, names.SAMPLER_RATE: 61234.0, "other": 1.0})
    tracker.log(13, {names.HELDOUT: 0.5})
    tracker.log(13, {"other": 1.0})
    first, _, third, heldout = out.getvalue().splitlines()
    assert first == "step 11/100 | reward 0.250 | parity 3.0e-06 | sample tok/s 61k"
    assert third == first.replace("11/", "13/") + " | to go 58:00"
    assert heldout == "step 13/100 | held-out 0.500 | to go 58:00"


@pytest.mark.parametrize("value,text", [(0, "0"), (950, "950"), (1234, "1.2k"), (34000, "34k"), (1.2e6, "1.2M")])
def test_rates(value, text):
    from jaxrl.metrics.progress import rate

    assert rate(value) == text
