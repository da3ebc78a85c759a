"""The domain, its TLS port and what clients are told, from the settings that decide them."""

import pytest

from agentenv.config.load import load
from agentenv.core.errors import InvalidInput


def api(**values):
    return load(environ={f"AENV_API_{name.upper()}": str(value) for name, value in values.items()}).api


@pytest.mark.parametrize(
    ("settings", "tls_port", "client_domain"),
    [
        ({}, None, "localhost:3000"),
        ({"port": 4000}, None, "localhost:4000"),
        ({"tls_port": 8443}, None, "localhost:3000"),  # no names to make a certificate for
        ({"domain": "my.tld"}, 443, "my.tld"),
        ({"domain": "my.tld", "tls_port": 8443}, 8443, "my.tld:8443"),
        ({"domain": "my.tld:443", "tls_port": 8443}, 8443, "my.tld:443"),  # forwarded from 443
        ({"domain": "My.TLD", "tls_port": "off"}, None, "my.tld"),
        ({"domain": "sbx.localhost:8443"}, 8443, "sbx.localhost:8443"),
        ({"domain": "sbx.localhost:3000"}, None, "sbx.localhost:3000"),  # the plain port: no TLS asked for
        ({"domain": "localhost:3000"}, None, "localhost:3000"),
        ({"domain": "a-b.c1.example"}, 443, "a-b.c1.example"),
        ({"domain": "intranet", "tls_cert": "/c.pem", "tls_key": "/k.pem"}, 443, "intranet"),
    ],
)
def test_what_follows_from_the_settings(settings, tls_port, client_domain):
    found = api(**settings)
    assert (found.tls_listen_port, found.client_domain) == (tls_port, client_domain)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"domain": "https://my.tld"}, "not a domain name"),
        ({"domain": "*.my.tld"}, "not a domain name"),
        ({"domain": "my_host.tld"}, "not a domain name"),
        ({"domain": "my..tld"}, "not a domain name"),
        ({"domain": ".tld"}, "not a domain name"),
        ({"domain": "-a.tld"}, "not a domain name"),
        ({"domain": "my.tld:"}, "not a domain name"),
        ({"domain": "my.tld:0"}, "not a domain name"),
        ({"domain": "my.tld:65536"}, "not a domain name"),
        ({"domain": "10.0.0.1"}, "not a domain name"),  # its sandboxes would have no host names
        ({"domain": "x" * 64 + ".tld"}, "not a domain name"),
        ({"domain": "a." * 120 + "tld"}, "not a domain name"),
        ({"domain": "localhost"}, "two or more labels"),
        ({"domain": "localhost:8443"}, "two or more labels"),
        ({"domain": "my.tld", "tls_cert": "/c.pem"}, "go together"),
        ({"domain": "my.tld", "tls_port": 3000}, "must differ"),
        ({"domain": "my.tld", "tls_port": "0"}, "tls_port"),
        ({"domain": "my.tld", "tls_port": "on"}, "tls_port"),
    ],
)
def test_settings_that_cannot_work_say_why(settings, reason):
    with pytest.raises(InvalidInput, match=reason):
        api(**settings)
