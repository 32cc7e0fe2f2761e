"""Workloads: models (`models`), data (`data`), and the cutting of models into stages (`partition`)."""
