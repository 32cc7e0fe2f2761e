"""Plug-in of rarely used codecs, compressors and replica methods, which raysim's notation finds by entry points."""
