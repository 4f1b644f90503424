"""mismatch: do the inference engine and the trainer give the same tokens the same probabilities?"""

__version__ = "0.1.0"
