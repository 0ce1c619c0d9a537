"""From a config.env to a running vLLM server: flags, platform, command, checks, process."""
