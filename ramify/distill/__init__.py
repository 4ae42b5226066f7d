"""Data for distillation: problems in, samples of two models out."""
