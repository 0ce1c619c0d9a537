"""A checkpoint folder: check it, stream its tensors, describe it by a manifest, publish it by one rename."""
