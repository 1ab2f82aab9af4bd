"""Baton's vocabulary: what crosses processes, errors, configuration, time, lifecycle, metrics, log.

Imports nothing else of Baton, no torch, no ray, no grpc.
"""
