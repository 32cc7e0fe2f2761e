"""Predictions beside real Ray clusters over real shaped links, case by case."""
