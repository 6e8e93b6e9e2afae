"""W&B is asked for by name; without the package that is an error before anything starts."""

import importlib.util

import pytest

from jaxrl.config import ConfigError, LogConfig
from jaxrl.metrics import check_trackers, make_trackers

HAS_WANDB = importlib.util.find_spec("wandb") is not None
ASKED = LogConfig(tensorboard=False, live=False, wandb="a project")


@pytest.mark.skipif(HAS_WANDB, reason="wandb is installed here")
def test_a_missing_package_is_named_with_the_fix(tmp_path):
    check_trackers(LogConfig())
    for start in (lambda: check_trackers(ASKED), lambda: make_trackers(ASKED, tmp_path, -1, 1)):
        with pytest.raises(ConfigError, match="`log.wandb`: .*pip install wandb"):
            start()


@pytest.mark.skipif(not HAS_WANDB, reason="wandb is not installed here")
def test_a_run_that_goes_on_is_the_same_run(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    (tmp_path / "config.toml").write_text("seed = 7\n")
    ids = []
    for start in (-1, 1):
        trackers = make_trackers(ASKED, tmp_path, start, 3)
        tracker = next(t for t in trackers.members if type(t).__name__ == "WandbTracker")
        assert tracker._run.config["seed"] == 7
        trackers.log(start + 2, {"loss": 0.5})
        assert tracker._run.summary["loss"] == 0.5 and tracker._run.summary["step"] == start + 2
        trackers.close()
        ids.append((tmp_path / "wandb_id").read_text())
    assert ids[0] == ids[1] and list((tmp_path / "wandb").glob(f"offline-run-*-{ids[0]}"))
