"""Validation of predictions against real Ray clusters over real shaped links, case by case."""
