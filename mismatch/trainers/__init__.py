"""Trainers: a framework's own code computes the log-probabilities, in the user's environment.

One file per framework. Everything here is imported in that environment's interpreter (Python 3.10
or newer), so it imports only numpy, torch, the framework, and ``mismatch.errors`` and
``mismatch.run.messages``, which need no other package.
"""
