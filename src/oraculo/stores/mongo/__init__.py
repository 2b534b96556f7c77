"""Runs in MongoDB: for several engines at once, in documents that other applications can read."""

from oraculo.stores.mongo.store import MongoStore

__all__ = ["MongoStore"]
