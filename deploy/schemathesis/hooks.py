"""What schemathesis checks of every answer beside its own checks."""

import re

import schemathesis

# What a schema cannot say: a request of the right form that is refused with 400 for what it means, and why the form cannot tell.
REFUSED_FOR_ITS_MEANING = [
    # A reference into the catalog; that it does not hold is `invalid_request` (specification, Errors).
    r"`sku` is not the name or id of",
    # Opaque, and bound to the list, filter and order that it came from.
    r"`page_token` is not the next_page of this list",
    # Preconditions of the life cycle are `invalid_request` (specification, Errors).
    r"^A node that is \S+ cannot be",
    # Of a node that does not fit its SKU.
    r"^`gpus_total` is \d+, but a node of this SKU has|^The SKU is not offered in (this )?region",
    # A key's bytes must be a key; base64 that decodes to something else has the right form.
    r"^`(ssh_)?public_key` is refused",
    # A pattern with all that DNS and the address families forbid in host names would not be readable.
    r"^`host` ",
    # Every field of a change may be null, which says nothing; not all of them at once.
    r"^Nothing is to be changed",
    # schemathesis 4.32 takes the quotes off a header's value, and an entity tag has quotes (RFC 9110, section 8.8.3).
    r"^Header `If-Match` must be",
    # The catalog is served, and not frozen into the description: a key that is added must not break a client that was generated.
    r"^`key` is no policy key",
    # A bearer token goes with every request here, and this route takes its credentials once.
    r"^Send the credentials in the form or in the Authorization header, not in both",
    # An id of the caller's own things.
    r"^One of `ssh_key_ids` is not a key of yours",
    # What the deactivation of a SKU in use needs depends on whether it is in use.
    r"`impact_review`|`rollback_plan`",
    # Four fields of which one may be given: in a query no schema can say so, and in a body it would be four types for one.
    r"^A value has one scope",
    # Two fields of which one is given, for the same reason.
    r"^An account belongs to a user or to an organisation",
    # A policy value may allow less than the description does.
    r"^`queue_seconds` must be a whole number from 0 to \d+",
    r"^`amount_minor` must be from -\d+ to \d+, and not 0; policy",
    # The same of a payment, and of what is left of it.
    r"^`amount_minor` must be a whole number from \d+ to \d+(; policies|, which is left)",
    # Two fields of which one is given.
    r"^A refund is of a payment or of an allocation",
    # To JSON Schema 10.0 is a whole number; money is counted in digits.
    r"^Field `amount_minor` cannot be read: invalid type, expected a whole number",
    # No pattern matches every text that is not an address.
    r"^Field `(success|cancel)_url` cannot be read",
    # Whose events: the token says whether there is an organization.
    r"^Your access token names no organization",
    # Where a webhook goes: an address that is not reachable on the internet, or no address at all.
    r"^`url` is refused: ",
    r"^A webhook needs a `url`",
    r"^An e-mail goes to the address",
    r"^Nothing is to be changed; give `url`",
    # An override of a health finding: which fields it needs follows from its classes, and what it may do from the findings it is for.
    r"^`tenant_message` is required with",
    r"^A tenant's program can cause what this override is for",
    r"^`pattern` must be a probe, a slash and a code",
    # A form that this installation does not have.
    r"^This installation publishes no package",
    # Whether a rollout has nodes follows from the inventory.
    r"^`selector` matches no node",
    r"^`selector\.sku` is not the name or id of a SKU",
    r"^`selector\.node_ids` has ",
]

# The same, where a code of its own says so: what an address leads to, and what the one key admits that a value is for.
CODES_OF_A_MEANING = ["probe_target_denied", "policy_out_of_bounds"]


def resolved(case, part):
    """A part of the description, or what it refers to (`$ref`)."""
    while "$ref" in part:
        names = part["$ref"].removeprefix("#/").split("/")
        part = case.operation.schema.raw_schema
        for name in names:
            part = part[name.replace("~1", "/").replace("~0", "~")]
    return part


@schemathesis.check
def one_of_the_listed_codes(ctx, response, case):
    """A refusal is the envelope, and its code is one that the route lists for the status (`x-error-codes`)."""
    if response.status_code < 400:
        return
    body = response.json()
    sent = response.headers["x-correlation-id"][0]
    assert body["correlation_id"] == sent, f"the envelope says {body['correlation_id']}, the header {sent}"
    assert len(body["message"]) > 10, "the message says nothing"
    assert body["details"]["service"] == "api"
    described = case.operation.definition.raw["responses"].get(str(response.status_code))
    # A method that the path does not have is no operation.
    if described is None and response.status_code == 405:
        assert body["code"] == "method_not_allowed"
        return
    assert described is not None, f"the route does not list status {response.status_code}"
    codes = resolved(case, described)["x-error-codes"]
    assert body["code"] in codes, f"{body['code']} is none of {codes}"


@schemathesis.check
def what_the_schema_allows_is_read(ctx, response, case):
    """A request that fits its schema is not refused as unreadable: the bounds in the description are those of the service.

    In place of schemathesis' own `positive_data_acceptance`, which cannot tell the two meanings of 400 apart.
    """
    if case.meta is None or not case.meta.generation.mode.is_positive or response.status_code not in (400, 413, 415):
        return
    body = response.json()
    known = any(re.search(meaning, body["message"]) for meaning in REFUSED_FOR_ITS_MEANING)
    known = known or body["code"] in CODES_OF_A_MEANING
    assert known, f"refused, though it fits: {body['message']}"
