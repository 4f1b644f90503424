"""Two engines and the trainer: who stands apart?"""
