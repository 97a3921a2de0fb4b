{{/* The name that everything begins with. */}}
{{- define "relay.name" -}}
{{- if contains "relay" .Release.Name }}{{ .Release.Name | trunc 50 | trimSuffix "-" }}{{ else }}{{ printf "%s-relay" .Release.Name | trunc 50 | trimSuffix "-" }}{{ end }}
{{- end }}

{{/* Labels that choose a role's pods: (dict "root" $ "role" "api"). */}}
{{- define "relay.selector" -}}
app.kubernetes.io/name: relay
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end }}

{{- define "relay.labels" -}}
{{ include "relay.selector" . }}
app.kubernetes.io/version: {{ .root.Values.image.tag | default .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version }}
{{- end }}

{{- define "relay.image" -}}
{{ .root.Values.image.repository }}-{{ .role }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}
{{- end }}

{{/* A role's variables: with "secrets", the names of those that come from the Secret. In no ConfigMap, so that a change
     of a value replaces the pods. */}}
{{- define "relay.env" -}}
- {name: RELAY_SHUTDOWN_GRACE_SECS, value: {{ .root.Values.shutdownGraceSecs | quote }}}
{{- range $name, $value := .root.Values.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- range .secrets }}
- name: {{ . }}
  valueFrom: {secretKeyRef: {name: {{ $.root.Values.secret.name }}, key: {{ index $.root.Values.secret.keys . }}}}
{{- end }}
{{- with .root.Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* What every pod has: no token, no service links (RELAY_…_PORT would be taken for settings), no root, no privileges. */}}
{{- define "relay.pod" -}}
enableServiceLinks: false
automountServiceAccountToken: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: tmp
    emptyDir: {sizeLimit: 16Mi}
{{- end }}

{{- define "relay.container" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
{{- end }}

{{/* Where a role's pods go: its own wishes, and apart from each other where that can be. */}}
{{- define "relay.placing" -}}
{{- with .values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{ toYaml . | nindent 2 }}
{{- end }}
topologySpreadConstraints:
{{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{ include "relay.selector" $ | nindent 8 }}
{{- end }}
{{- end }}

{{/* The probes of publisher and worker. Both wait for the database before they answer at all, so a start may take an
     outage's time: an hour. After that /healthz asks nothing outside the process. */}}
{{- define "relay.metricsProbes" -}}
startupProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 720
livenessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 3
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /healthz, port: metrics}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}
