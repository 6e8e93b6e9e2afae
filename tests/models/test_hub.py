"""A checkpoint is a folder or a hub repository; anything else is named."""

import pytest

from jaxrl.config import ConfigError
from jaxrl.models.hub import local_folder


def test_a_folder_is_itself(tmp_path):
    assert local_folder("model.checkpoint", str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["/no/such/folder", "./nothing", "nothing"])
def test_a_missing_folder_is_named(name):
    with pytest.raises(ConfigError, match=f"model.checkpoint`: no such folder: {name}"):
        local_folder("model.checkpoint", name)


@pytest.mark.parametrize("name", ["nobody/nothing", "no body/nothing"])
def test_an_unreachable_repository_is_named(monkeypatch, name):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match=f"model.checkpoint`: {name} is no folder here"):
        local_folder("model.checkpoint", name)
