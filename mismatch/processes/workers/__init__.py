"""Child processes: one engine or one training world at a time, a job file in, artefacts out."""
