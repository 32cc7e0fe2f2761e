"""The machines that Ray's AWS provider asks for by the shipped file, from moto's EC2: types, ports, roles; none of it ran on AWS."""

from pathlib import Path

import pytest
import yaml

FILE = Path(__file__).parents[2] / "sweeps" / "cluster" / "aws.yaml"


@pytest.mark.slow
def test_aws_is_asked_for_the_machines_of_the_file(tmp_path, monkeypatch):
    boto3, moto = pytest.importorskip("boto3"), pytest.importorskip("moto")
    from ray.autoscaler._private.aws.config import bootstrap_aws
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
    from ray.autoscaler._private.util import prepare_config
    from ray.autoscaler.tags import TAG_RAY_NODE_KIND, TAG_RAY_USER_NODE_TYPE

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "tests")
    monkeypatch.delenv("AWS_ENDPOINT_URL", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray writes the key pair there
    (tmp_path / ".ssh").mkdir()
    with moto.mock_aws(config={"iam": {"load_aws_managed_policies": True}}):
        config = bootstrap_aws(prepare_config(yaml.safe_load(FILE.read_text())))
        provider = AWSNodeProvider(config["provider"], config["cluster_name"])
        for kind, count in (("head", 1), ("worker", config["available_node_types"]["worker"]["min_workers"])):
            node = config["available_node_types"][kind]["node_config"]
            provider.create_node(node, {TAG_RAY_NODE_KIND: kind, TAG_RAY_USER_NODE_TYPE: kind}, count)
        client = boto3.client("ec2", region_name="eu-central-1")
        found = [one for group in client.describe_instances()["Reservations"] for one in group["Instances"]]
        groups = client.describe_security_groups(GroupIds=[one["GroupId"] for one in found[0]["SecurityGroups"]])
    assert {one["InstanceType"] for one in found} == {
        "g5.xlarge",
        "m6i.xlarge",
    }  # moto gives the least that is asked for
    assert {one.get("InstanceLifecycle") for one in found if one["InstanceType"] == "g5.xlarge"} == {"spot"}
    assert {one["Placement"]["AvailabilityZone"] for one in found} == {"eu-central-1a"}
    assert {one["SecurityGroups"][0]["GroupId"] for one in found} == {groups["SecurityGroups"][0]["GroupId"]}
    open_to_all = [
        (rule.get("FromPort"), rule.get("ToPort"))
        for rule in groups["SecurityGroups"][0]["IpPermissions"]
        if any(range_["CidrIp"] == "0.0.0.0/0" for range_ in rule["IpRanges"])
    ]
    assert open_to_all == [(22, 22)]  # Ray's ports are for the group alone
    assert (tmp_path / ".ssh" / Path(config["auth"]["ssh_private_key"]).name).stat().st_mode & 0o077 == 0
