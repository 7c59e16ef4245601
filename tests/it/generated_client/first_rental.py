"""The first rental with nothing but the generated client: a SKU, a node and its token, an allocation, its end."""

import json
import os
import ssl
import sys
import time
import uuid

from gpuaas_api import AuthenticatedClient
from gpuaas_api.api.allocation import allocation_create, allocation_get, allocation_release
from gpuaas_api.api.node import node_create, node_get, node_issue_token
from gpuaas_api.api.platform_role import platform_role_bind
from gpuaas_api.api.sku import sku_activate, sku_create, sku_get
from gpuaas_api.api.ssh_key import ssh_key_add
from gpuaas_api.models import (
    Allocation,
    AllocationState,
    Error,
    NewAllocation,
    NewBinding,
    NewCpu,
    NewGpu,
    NewNode,
    NewPrice,
    NewSku,
    NewSshKey,
    NewToken,
    Node,
    NodeState,
    OnboardingMode,
    PlatformRoleBinding,
    PlatformRoleName,
    Sku,
    SkuDecision,
    SkuStatus,
)

REGION = "test-1"
PATIENCE = 120


def client(token: str) -> AuthenticatedClient:
    trust = ssl.create_default_context(cafile=os.environ["SVC_CA_BUNDLE_PATH"])
    return AuthenticatedClient(base_url=os.environ["SVC_BASE_URL"], token=token, verify_ssl=trust, timeout=30)


def once() -> str:
    """An `Idempotency-Key`."""
    return str(uuid.uuid4())


def wait_until(look, reached, what: str):
    end = time.monotonic() + PATIENCE
    while not reached(seen := look()):
        if isinstance(seen, Error) or time.monotonic() > end:
            sys.exit(f"not reached: {what}; it is {seen}")
        time.sleep(0.2)
    return seen


def expect(kind, answer):
    if not isinstance(answer, kind):
        sys.exit(f"expected {kind.__name__}, got {answer}")
    return answer


admin = client(os.environ["ADMIN_TOKEN"])
other_admin = client(os.environ["ADMIN_TOKEN_2"])
user = client(os.environ["USER_TOKEN"])

new_sku = NewSku(
    name="generated",
    gpu=NewGpu(vendor="NVIDIA", model="H100", memory_mib=81920, count=8),
    cpu=NewCpu(model="any", cores=2),
    memory_mib=4096,
    storage_gib=10,
    interconnect="nvlink",
    allowed_regions=[REGION],
    price=NewPrice(currency="USD", amount_minor_per_gpu_hour=250),
)
sku = expect(Sku, sku_create.sync(client=admin, body=new_sku, idempotency_key=once()))
roles = [PlatformRoleName.PLATFORM_OPERATIONS, PlatformRoleName.INVENTORY_OWNER]
for variable, role in zip(["ADMIN_SUBJECT", "ADMIN_SUBJECT_2"], roles):
    binding = NewBinding(subject=os.environ[variable], role=role, reason="the first rental")
    expect(PlatformRoleBinding, platform_role_bind.sync(client=admin, body=binding, idempotency_key=once()))
decision = SkuDecision(reason="offered")
for approver in [admin, other_admin]:
    expect(Sku, sku_activate.sync(sku.id, client=approver, body=decision, idempotency_key=once()))
wait_until(lambda: sku_get.sync(sku.id, client=admin), lambda it: it.status == SkuStatus.ACTIVE, "the SKU is active")

new_node = NewNode(
    host="generated.internal",
    port=22,
    ssh_username="gpuaas",
    ssh_public_key=os.environ["SSH_PUBLIC_KEY"],
    sku="generated",
    gpus_total=8,
    region_code=REGION,
    onboarding_mode=OnboardingMode.MANUAL,
    probe=False,
)
node = expect(Node, node_create.sync(client=admin, body=new_node, idempotency_key=once()))
issued = node_issue_token.sync(node.id, client=admin, body=NewToken(ttl_seconds=600))
print("BUNDLE", json.dumps(issued.bootstrap_bundle.to_dict()))
sys.stdin.readline()

wait_until(lambda: node_get.sync(node.id, client=admin), lambda it: it.state == NodeState.ACTIVE, "the node is active")
print("NODE active")

new_key = NewSshKey(name="generated", public_key=os.environ["SSH_PUBLIC_KEY"])
ssh_key_add.sync(client=user, body=new_key, idempotency_key=once())
wanted = NewAllocation(sku="generated", gpu_count=4, region_code=REGION)
allocation = expect(Allocation, allocation_create.sync(client=user, body=wanted, idempotency_key=once()))


def in_state(state: AllocationState):
    look = lambda: allocation_get.sync(allocation.id, client=user)
    return wait_until(look, lambda it: it.state == state, f"the allocation is {state}")


active = in_state(AllocationState.ACTIVE)
assert len(active.devices) == 4 and active.ssh.port == 22 and active.price.currency == "USD", active
print("ALLOCATION active")
expect(Allocation, allocation_release.sync(allocation.id, client=user, idempotency_key=once()))
released = in_state(AllocationState.RELEASED)
assert released.failure is None and released.released_at is not None, released
print("ALLOCATION released")

refused = expect(Error, allocation_get.sync(uuid.uuid4(), client=user))
assert refused.message and refused.correlation_id and refused.details["service"] == "api", refused
print("REFUSED", refused.code)
print("DONE")
