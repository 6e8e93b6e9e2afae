"""Where a checkpoint's files are: a folder, or a repository of the Hugging Face hub."""

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled

from jaxrl.config import ConfigError

FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def local_folder(key: str, name: str) -> Path:
    """The folder `name`, or the local copy of hub repository `name` ("owner/model"), fetched if need be.

    Raises ConfigError naming `key` if it is neither.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(key, f"no such folder: {name}")
    try:
        return Path(snapshot_download(name, allow_patterns=FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled, OSError) as error:
        raise ConfigError(
            key,
            f"{name} is no folder here, and the Hugging Face hub did not give it ({type(error).__name__}): "
            "check the name or the network, or give the folder of a downloaded checkpoint",
        ) from error
