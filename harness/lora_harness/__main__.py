"""`python -m lora_harness`, which is what torchrun starts."""

from lora_harness.cli import main

if __name__ == "__main__":
    main()
