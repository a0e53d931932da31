"""Schemas of custom resources, written from their documentation: KEDA's ScaledObject (keda.sh, v2.13), the Prometheus
operator's ServiceMonitor and PrometheusRule (its API reference), and InferencePool of the Gateway API Inference
Extension (v1). They have the fields that the chart may use and no others. No operator has read the chart's output.
"""

from typing import Any

TEXT = {"type": "string", "minLength": 1}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}
DURATION = {"type": "string", "pattern": "^([0-9]+(ms|s|m|h|d|w|y))+$"}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}


def fields(required: str, **properties: Any) -> dict[str, Any]:
    """An object with these fields alone; ``required`` names those that must be there."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


def resource(api_version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    metadata = fields("name labels", name=TEXT, labels=TEXTS)
    return fields(
        "apiVersion kind metadata spec",
        apiVersion={"const": api_version},
        kind={"const": kind},
        metadata=metadata,
        spec=spec,
    )


SELECTOR = fields("matchLabels", matchLabels=TEXTS)
RELABELING = fields(
    "action",
    sourceLabels={"type": "array", "items": TEXT},
    regex=TEXT,
    targetLabel=TEXT,
    replacement={"type": "string"},
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
)
ENDPOINT = fields(
    "port", port=TEXT, path=TEXT, interval=DURATION, metricRelabelings={"type": "array", "items": RELABELING}
)
RULE = fields(
    "alert expr",
    alert=TEXT,
    expr=TEXT,
    labels=TEXTS,
    annotations=TEXTS,
    **{"for": DURATION, "keep_firing_for": DURATION},
)
RULES = fields(
    "groups",
    groups={
        "type": "array",
        "minItems": 1,
        "items": fields(
            "name rules", name=TEXT, interval=DURATION, rules={"type": "array", "minItems": 1, "items": RULE}
        ),
    },
)
TRIGGER = fields(
    "type metricType metadata",
    type={"const": "prometheus"},
    metricType={"enum": ["AverageValue", "Value"]},
    metadata=fields(
        "serverAddress query threshold",
        serverAddress=TEXT,
        query=TEXT,
        threshold=TEXT,
        ignoreNullValues={"enum": ["true", "false"]},
    ),
)
SCALED_OBJECT = fields(
    "scaleTargetRef triggers",
    scaleTargetRef=fields("name", apiVersion=TEXT, kind=TEXT, name=TEXT),
    minReplicaCount={"type": "integer", "minimum": 0},
    maxReplicaCount={"type": "integer", "minimum": 1},
    pollingInterval={"type": "integer", "minimum": 1},
    advanced=fields(
        "horizontalPodAutoscalerConfig",
        horizontalPodAutoscalerConfig=fields(
            "behavior",
            behavior=fields(
                "scaleDown",
                scaleDown=fields(
                    "stabilizationWindowSeconds",
                    stabilizationWindowSeconds={"type": "integer", "minimum": 0, "maximum": 3600},
                ),
            ),
        ),
    ),
    triggers={"type": "array", "minItems": 1, "items": TRIGGER},
)
INFERENCE_POOL = fields(
    "selector targetPorts endpointPickerRef",
    selector=SELECTOR,
    targetPorts={"type": "array", "minItems": 1, "maxItems": 8, "items": fields("number", number=PORT)},
    endpointPickerRef=fields(
        "name port",
        group={"type": "string"},
        kind=TEXT,
        name=TEXT,
        port=fields("number", number=PORT),
        failureMode={"enum": ["FailOpen", "FailClose"]},
    ),
)
ENDPOINTS = {"type": "array", "minItems": 1, "items": ENDPOINT}
SERVICE_MONITOR = fields("selector endpoints", jobLabel=TEXT, selector=SELECTOR, endpoints=ENDPOINTS)
MONITORING = "monitoring.coreos.com/v1"
CUSTOM_RESOURCES: dict[str, dict[str, Any]] = {
    "ServiceMonitor": resource(MONITORING, "ServiceMonitor", SERVICE_MONITOR),
    "PrometheusRule": resource(MONITORING, "PrometheusRule", RULES),
    "ScaledObject": resource("keda.sh/v1alpha1", "ScaledObject", SCALED_OBJECT),
    "InferencePool": resource("inference.networking.k8s.io/v1", "InferencePool", INFERENCE_POOL),
}
