"""Running vLLM and SGLang servers as an engine: token ids in, token ids and logprobs out."""
