"""Hosts with shaped links on this machine, and Ray clusters on them."""
