"""What turns a config.env into a running vLLM server: flags, platform, command, checks, process."""
