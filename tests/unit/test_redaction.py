"""Credentials planted in text of every kind are taken out; settings that look like them stay."""

import pytest

from tuner.redaction import MARK, is_secret_name, redact, redact_value

SECRET = "s3cr3t-Value-0123456789"


@pytest.mark.parametrize(
    "text",
    [
        f"HF_TOKEN={SECRET}",
        f"export WANDB_API_KEY='{SECRET}'",
        f'{{"password": "{SECRET}", "user": "me"}}',
        f"aws_secret_access_key = {SECRET}",
        f"train.py --api-key {SECRET} --lr 1e-4",
        f"train.py --hf-token={SECRET}",
        f"['train.py', '--hub-token', '{SECRET}']",
        f"Authorization: Bearer {SECRET}",
        f"curl -H 'authorization: Basic {SECRET}'",
        f"http://me:{SECRET}@mlflow.example:5000/path",
        f"postgresql+psycopg2://u:{SECRET}@db/x failed",
        f"https://x.example/?access_token={SECRET}&a=1",
        f"clientSecret: {SECRET}",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
    ],
)
def test_a_planted_secret_is_gone(text):
    cleaned = redact(text, environ={})
    assert SECRET not in cleaned
    assert MARK in cleaned


@pytest.mark.parametrize(
    "token",
    [
        "hf_" + "a1B2" * 8,
        "ghp_" + "a1B2" * 9,
        "glpat-" + "a1B2" * 5,
        "nvapi-" + "a1B2" * 10,
        "AKIA" + "ABCD1234" * 2,
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.abcDEF123",
    ],
)
def test_tokens_are_known_by_their_form(token):
    assert token not in redact(f"cloning with {token} now", environ={})


def test_values_of_secret_variables_are_taken_out_wherever_they_stand():
    environ = {"DB_PASSWORD": "correct horse", "HOME": "/home/user", "API_KEY_COUNT": "3"}
    text = "login with correct horse failed in /home/user"
    assert redact(text, environ) == f"login with {MARK} failed in /home/user"


def test_settings_of_training_runs_stay():
    text = (
        "moe_token_dispatcher_type=alltoall tokens_per_s_per_gpu: 1234.5 --tokenizer-type "
        "NullTokenizer tokenizer_model=x/y make_vocab_size_divisible_by: 128 num_tokens=4096 "
        "calculate_per_token_loss=true --attention-backend flash NCCL_DEBUG=INFO s3://bucket/a "
        "key: value path=/a/b"
    )
    assert redact(text, environ={}) == text


def test_documents_are_cleaned_by_key_and_by_value():
    document = {"tracking": {"uri": f"http://u:{SECRET}@h"}, "env": {"HF_TOKEN": SECRET}, "n": 1}
    cleaned = redact_value(document)
    assert SECRET not in str(cleaned)
    assert cleaned["env"] == {"HF_TOKEN": MARK}
    assert cleaned["n"] == 1


def test_names_that_say_secret():
    assert is_secret_name("HF_TOKEN")
    assert is_secret_name("--api-key")
    assert not is_secret_name("moe_token_dispatcher_type")
    assert not is_secret_name("num_tokens")
