"""Tokens that a service grants. Not in litgpt_demo.secrets, which each command imports before it needs Pydantic."""

from __future__ import annotations

import re

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, SecretStr, ValidationError


class Grant(BaseModel):
    """The response of a token service."""

    model_config = ConfigDict(hide_input_in_errors=True)

    token: SecretStr = Field(validation_alias=AliasChoices("token", "access_token", "accessToken"))
    expires: float | None = Field(None, validation_alias=AliasChoices("expires_in", "expiresIn"))
    """Seconds for which the token is valid."""

    @classmethod
    def read(cls, content: bytes) -> Grant | None:
        """Return the grant in a response; None without a token that a header can carry."""
        try:
            grant = cls.model_validate_json(content)
        except ValidationError:
            return None
        return grant if re.fullmatch(r"[\x21-\x7e]+", grant.token.get_secret_value()) else None
