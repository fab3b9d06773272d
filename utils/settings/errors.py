"""The error of settings. It stands alone, so that who tells of it loads no schema."""


class SettingsError(ValueError):
    """The settings are at fault: the message says what, where, the value and the way out."""
