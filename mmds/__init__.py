"""mmds: train multimodal language models (vision encoder + connector + language model) with DeepSpeed."""

__version__ = "0.1.0"
