{{- define "neaptide.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 50 | trimSuffix "-" -}}
{{- else if contains (default .Chart.Name .Values.nameOverride) .Release.Name -}}
{{- .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (default .Chart.Name .Values.nameOverride) | trunc 50 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "neaptide.selector" -}}
app.kubernetes.io/name: neaptide
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "neaptide.labels" -}}
{{ include "neaptide.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "neaptide.image" -}}
{{ printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end -}}

{{/* Whether several servers share a database. */}}
{{- define "neaptide.shared" -}}
{{- if .Values.store.existingSecret }}true{{ end -}}
{{- end -}}

{{/* Seconds between the decision to stop a pod and its kill. */}}
{{- define "neaptide.gracePeriod" -}}
{{- $d := .Values.drain -}}
{{- add (int $d.preStopS) (max (int $d.minS) (int $d.timeoutS)) (int $d.marginS) -}}
{{- end -}}

{{/* Of every pod. */}}
{{- define "neaptide.podSpec" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.serviceAccount.name }}
serviceAccountName: {{ . }}
{{- end }}
automountServiceAccountToken: false
# A service of the name neaptide would make variables that look like settings.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "neaptide.gracePeriod" . }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- end -}}

{{/* Of every container. */}}
{{- define "neaptide.container" -}}
image: {{ include "neaptide.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: ["neaptide"]
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: ["ALL"]}
ports:
  - {name: http, containerPort: 8000}
# Why a container ended stands in the pod's status.
terminationMessagePolicy: FallbackToLogsOnError
readinessProbe:
  httpGet: {path: /ready, port: http}
  periodSeconds: 5
  timeoutSeconds: 4
  failureThreshold: 2
livenessProbe:
  httpGet: {path: /livez, port: http}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 3
lifecycle:
  preStop:
    exec: {command: ["sleep", {{ .Values.drain.preStopS | quote }}]}
{{- end -}}

{{/* Variables of every container. */}}
{{- define "neaptide.env" -}}
- {name: NEAPTIDE_HOST, value: "0.0.0.0"}
- {name: NEAPTIDE_PORT, value: "8000"}
{{- /* Not the volume's root, which belongs to root: the server makes a directory that no other user may read. */}}
- {name: NEAPTIDE_DATA_DIR, value: /data/neaptide}
- {name: NEAPTIDE_DRAIN_MIN_S, value: {{ .Values.drain.minS | quote }}}
- {name: NEAPTIDE_DRAIN_TIMEOUT_S, value: {{ .Values.drain.timeoutS | quote }}}
- {name: HF_HOME, value: {{ .Values.modelCache.mountPath | quote }}}
{{- range $name, $value := .Values.config }}
{{- /* Helm reads every number as a float, and would write a million as 1e+06. */}}
{{- if kindIs "float64" $value }}
{{- if eq $value (floor $value) }}
{{- $value = printf "%.0f" $value }}
{{- end }}
{{- end }}
- {name: NEAPTIDE_{{ upper $name }}, value: {{ $value | toString | quote }}}
{{- end }}
{{- with .Values.apiKeys.existingSecret }}
- name: NEAPTIDE_API_KEY
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.apiKeys.key }}}}
{{- end }}
{{- with .Values.apiKeys.file }}
{{- if .existingSecret }}
- {name: NEAPTIDE_API_KEY_FILE, value: /etc/neaptide/keys/{{ .key }}}
{{- end }}
{{- end }}
{{- with .Values.hub.existingSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.Values.hub.key }}}}
{{- end }}
{{- with .Values.hub.endpoint }}
- {name: HF_ENDPOINT, value: {{ . | quote }}}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Volumes of every pod besides its own, and where they are mounted. */}}
{{- define "neaptide.volumes" -}}
{{- with .Values.apiKeys.file }}
{{- if .existingSecret }}
- name: api-keys
  secret:
    secretName: {{ .existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .key }}, path: {{ .key }}}]
{{- end }}
{{- end }}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "neaptide.volumeMounts" -}}
{{- if .Values.apiKeys.file.existingSecret }}
# The directory: a changed secret does not reach a file that is mounted alone, with subPath.
- {name: api-keys, mountPath: /etc/neaptide/keys, readOnly: true}
{{- end }}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "neaptide.placement" -}}
{{- with .Values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "neaptide.claim" -}}
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {{ .name }}
spec:
  accessModes: [ReadWriteOnce]
  {{- with .storageClass }}
  storageClassName: {{ . | quote }}
  {{- end }}
  resources:
    requests: {storage: {{ .size }}}
{{- end -}}
