"""SGLang on a machine without an accelerator: a plugin of SGLang's own extension point `sglang.srt.plugins`."""


def activate() -> None:
    """Called by SGLang in each of its processes before anything else of the engine runs."""
