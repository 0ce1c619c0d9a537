"""config.env to a running vLLM: flags, platform, launch, and what runs inside the process of vLLM."""
