"""Default folder of a peer, and its default name. Imported by every command, so it imports next to nothing."""

from __future__ import annotations

import platform
from pathlib import Path

DEFAULT_DIR = "atoll-run"
MODEL_CONFIG = "model-config.json"  # configuration of an attached Hugging Face model


def default_name(folder: Path) -> str:
    """The computer's name, followed by the folder's if that is not the default: a computer may hold many peers."""
    own = "" if folder.name == DEFAULT_DIR else f"/{folder.name}"
    return f"{platform.node()}{own}".replace("@", "-")  # an @ begins the group: policy/participation.py
