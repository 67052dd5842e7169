"""The entry point that torch calls at `import torch`: it makes the name "offbeat" known, and loads nothing of offbeat.

Nothing here may raise, whatever the installation is like: an entry point that does breaks `import torch` for everybody.
"""


def register() -> None:
    """Let `torch.distributed.init_process_group("offbeat")` find its backend."""
    try:
        from torch.distributed import Backend

        if "OFFBEAT" not in Backend._plugins:
            Backend.register_backend("offbeat", _create, extended_api=True, devices=["cpu", "cuda"])
    except Exception:  # a torch without distributed, or one that is too old: asking for the backend says so
        pass


def _create(options, backend_options):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
    from offbeat.c10d import make_group

    return make_group(options, backend_options)
