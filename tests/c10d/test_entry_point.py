"""What torch loads at import: a name, and nothing of offbeat; and never an error, whatever the installation is like."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

import offbeat_torch

if TYPE_CHECKING:
    import pytest


def run(code: str, *options: str) -> str:
    done = subprocess.run([sys.executable, *options, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_name_is_known_and_nothing_of_offbeat_is_loaded() -> None:
    code = (
        "import sys, torch.distributed as dist\n"
        "print('OFFBEAT' in dist.Backend._plugins, [m for m in sys.modules if m.split('.')[0] == 'offbeat'])"
    )
    assert run(code, "-W", "error") == "True []"


def test_in_a_broken_installation_torch_is_imported_all_the_same() -> None:
    code = "import sys; sys.modules['offbeat'] = None\nimport torch; print(torch.ones(1).item())"
    assert run(code) == "1.0"


def test_an_error_within_torch_is_kept_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise TypeError("register_backend() got an unexpected keyword argument 'devices'")

    monkeypatch.setattr(dist.Backend, "register_backend", fails)
    monkeypatch.setattr(dist.Backend, "_plugins", {})
    offbeat_torch.register()
