"""How the policy reaches the engines: as adapters (`adapter_mode`), or merged into the base (`merge_mode`)."""
