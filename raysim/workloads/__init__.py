"""Workloads: models (`models`), data (`data`), and how a model is cut into stages (`partition`)."""
