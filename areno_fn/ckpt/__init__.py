"""The disk: Hugging Face folders, trees of tensors and resumable state, as safetensors, JSON and msgpack alone."""
