"""Keys of an AWS account become a login, or an error that says what to do."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from ecr_stub import Ecr, serving

from agentenv.core.errors import AgentEnvError, HostNotReady, InvalidInput, PermissionDenied, Unavailable
from agentenv.image import ecr
from agentenv.image.credentials import Credentials

HOST = "123456789012.dkr.ecr.eu-central-1.amazonaws.com"
KEYS = {"awsAccessKeyId": "AKIDEXAMPLE", "awsSecretAccessKey": "secret/key", "awsRegion": "eu-central-1"}


@pytest.fixture
def amazon(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ecr]:
    with serving(monkeypatch) as stub:
        yield stub


def test_a_login_is_asked_for_with_the_keys_that_were_given(amazon: Ecr, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-the-node")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-the-node")
    monkeypatch.setenv("AWS_PROFILE", "which-is-not-there")
    amazon.give("AWS:p:w")
    assert ecr.login(HOST, KEYS) == Credentials("AWS", "p:w")
    (asked,) = amazon.asked
    assert asked["x-amz-target"].endswith(".GetAuthorizationToken")
    assert asked["authorization"].startswith("AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/")
    assert "/eu-central-1/ecr/aws4_request" in asked["authorization"]
    assert "secret/key" not in str(asked)
    assert "x-amz-security-token" not in asked


def test_the_public_registry_has_a_service_of_its_own(amazon: Ecr):
    amazon.give("AWS:public", public=True)
    assert ecr.login("public.ecr.aws", KEYS) == Credentials("AWS", "public")
    assert "/us-east-1/ecr-public/aws4_request" in amazon.asked[0]["authorization"]


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (400, "UnrecognizedClientException", PermissionDenied),
        (403, "AccessDeniedException", PermissionDenied),
        (400, "InvalidSignatureException", PermissionDenied),
        (400, "ThrottlingException", Unavailable),
        (500, "ServerException", Unavailable),
    ],
)
def test_what_amazon_refuses_is_told(status: int, code: str, error: type[AgentEnvError], amazon: Ecr):
    amazon.refuse(status, code)
    with pytest.raises(error, match=code) as caught:
        ecr.login(HOST, KEYS)
    assert caught.value.hint
    assert type(caught.value) is error
    assert "secret/key" not in str(caught.value)


@pytest.mark.parametrize("answer", [{}, {"authorizationData": []}, {"authorizationData": [{"authorizationToken": "eA=="}]}])
def test_an_answer_without_a_login(answer: object, amazon: Ecr):
    amazon.answer = answer
    with pytest.raises(Unavailable, match="no login"):
        ecr.login(HOST, KEYS)


@pytest.mark.parametrize("region", ["", "not a region", "eu/../evil", "x" * 300])
def test_a_region_that_is_none(region: str, amazon: Ecr):
    with pytest.raises(InvalidInput, match="awsRegion"):
        ecr.login(HOST, KEYS | {"awsRegion": region})
    assert not amazon.asked


def test_nobody_answers(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL_ECR", "http://127.0.0.1:9")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:9"):
        ecr.login(HOST, KEYS)


def test_a_node_without_the_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "botocore", None)
    monkeypatch.setitem(sys.modules, "botocore.config", None)
    with pytest.raises(HostNotReady) as caught:
        ecr.login(HOST, KEYS)
    assert "agentenv[aws]" in caught.value.hint
