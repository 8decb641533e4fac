"""What a run was made with: versions, machine, command and settings. No user names, no credentials.

Paths are cut to their last part. Relative ones stay in the command, so that it can be typed again in the same folder.
"""

import platform
import re
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

import jax

from jfuse.evals.settings import Settings

PACKAGES = ("jfuse", "jax", "jaxlib", "flax", "numpy", "tokenizers", "transformers")

TTFT_STATE = "warm: chunk caches in device memory, the same request served before until nothing compiled"
"""In which state requests are timed."""

_SECRET = re.compile(r"(?i)(token|secret|password|passwd|api[-_]?key|credential)[^=\s]*[=\s]+\S+|hf_\w{8,}|://[^/\s]+@")


def about(settings: Settings, command: Sequence[str] = ()) -> dict[str, Any]:
    """The manifest's fields beside the identity of the rows."""
    plain = settings.as_dict()
    plain["models"] = [without_folders(name) for name in settings.models]
    for task in plain["tasks"]:
        for field in ("data", "haystack"):
            task[field] = task[field] and PurePath(task[field]).name
    timed = {"ttft": TTFT_STATE} if settings.ttft else {}
    return timed | {
        "command": " ".join(without_folders(word) for word in command),
        "settings": plain,
        "versions": {name: version(name) for name in PACKAGES},
        "machine": {
            "python": platform.python_version(),
            "system": platform.system(),
            "processor": platform.machine(),
            "devices": sorted({device.device_kind for device in jax.devices()}),
        },
    }


def without_folders(word: str) -> str:
    """A word of a command line with absolute paths cut to their last part and secrets blotted out.

    >>> without_folders("/home/ann/models/qwen.gguf"), without_folders("Qwen/Qwen3-8B"), without_folders("--token=ab12")
    ('qwen.gguf', 'Qwen/Qwen3-8B', '***')
    """
    if _SECRET.search(word):
        return "***"
    name, equals, value = word.partition("=")
    if equals and name.startswith("-"):
        return f"{name}={without_folders(value)}"
    if word.startswith(("/", "~", "..", ".")) or "\\" in word or (sys.platform == "win32" and ":" in word):
        return PurePath(word.replace("\\", "/")).name
    return word
