"""The settings: `oraculo.toml` and the environment, read once into one frozen object of sections."""

from oraculo.settings.keys import KeyRole, read_key
from oraculo.settings.loading import load_settings
from oraculo.settings.sections import (
    BUILT_IN_ROUTES,
    DEFAULT_BROKER_URL,
    DEFAULT_STORE_URL,
    ApiSettings,
    BrokerSettings,
    BullmqSettings,
    CelerySettings,
    EngineSettings,
    LimitSettings,
    LogSettings,
    ObjectSettings,
    QueueSettings,
    RunSettings,
    Settings,
    StoreSettings,
    WebhookSettings,
    WorkerSettings,
)

__all__ = [
    "BUILT_IN_ROUTES",
    "DEFAULT_BROKER_URL",
    "DEFAULT_STORE_URL",
    "ApiSettings",
    "BrokerSettings",
    "BullmqSettings",
    "CelerySettings",
    "EngineSettings",
    "KeyRole",
    "LimitSettings",
    "LogSettings",
    "ObjectSettings",
    "QueueSettings",
    "RunSettings",
    "Settings",
    "StoreSettings",
    "WebhookSettings",
    "WorkerSettings",
    "load_settings",
    "read_key",
]
