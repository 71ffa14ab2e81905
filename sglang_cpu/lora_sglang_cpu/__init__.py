"""SGLang on a machine without an accelerator.

A plugin of SGLang's own extension point, the entry-point group `sglang.srt.plugins`: SGLang calls `activate` in each
of its processes. Where there is an accelerator it does nothing. It replaces GPU kernels by plain torch so that tests
and small runs see the real SGLang: its scheduler, its adapter loading, its names and shapes. It says nothing about
the kernels it replaces.
"""


def activate() -> None:
    """Prepare this process for a CPU engine, or do nothing.

    Raises:
        CannotActivate: See `activation.wanted`.
        UnsupportedSGLang: The plugin is needed but the installed SGLang is not the one it was written for. Both are
            a `SystemExit`, because SGLang logs and forgets every other exception of a plugin and would die later of
            the missing hook.
    """
    from lora_sglang_cpu.activation import wanted

    if wanted():
        from lora_sglang_cpu.families import install

        install()
