{{/* Shared parts of the manifests. The context is the root unless a comment names another. */}}

{{- define "kiln.name" -}}
{{- if contains "kiln" .Release.Name }}{{ .Release.Name }}{{ else }}{{ printf "%s-kiln" .Release.Name }}{{ end }}
{{- end }}

{{- define "kiln.account" -}}
{{- .Values.serviceAccount.name | default (include "kiln.name" .) }}
{{- end }}

{{/* Labels of all objects. The alert rules require job="kiln", which comes from the first label. */}}
{{- define "kiln.labels" -}}
app.kubernetes.io/name: kiln
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{/* Selector labels of the pods of a part. Context: list of root and "bridge" or "jobs". */}}
{{- define "kiln.selector" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: kiln
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{/* Image of a part. Context: list of root and "bridge" or "jobs". */}}
{{- define "kiln.image" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
{{- $digest := get $root.Values.image (printf "%sDigest" $part) -}}
{{- $root.Values.image.repository }}/kiln-{{ $part }}{{ if $digest }}@{{ $digest }}{{ else }}:{{ $root.Values.image.tag }}{{ end }}
{{- end }}

{{/* Settings that override the settings file, and settings from secrets. */}}
{{- define "kiln.environment" -}}
- {name: KILN_CONFIG, value: /etc/kiln/kiln.toml}
- {name: KILN_STATE, value: /var/lib/kiln/state}
- {name: KILN_MONITOR__LISTEN, value: "0.0.0.0:4814"}
{{- range $name, $from := .Values.secrets }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef: {name: {{ $from.secret }}, key: {{ $from.key }}}
{{- end }}
{{- end }}

{{/* Kiln creates the state folder in the volume, readable only by its user. The group of the volume must not change the
     modes of existing files, because Kiln refuses a key that others may read. */}}
{{- define "kiln.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "kiln.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "kiln.probes" -}}
startupProbe:
  httpGet: {path: /health, port: monitor}
  periodSeconds: 5
  failureThreshold: 60
livenessProbe:
  httpGet: {path: /health, port: monitor}
  periodSeconds: 15
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /ready, port: monitor}
  periodSeconds: 10
{{- end }}

{{/* Placement of a pod. Context: list of root and the values of the part. */}}
{{- define "kiln.placement" -}}
{{- $root := index . 0 -}}
{{- $part := index . 1 -}}
serviceAccountName: {{ include "kiln.account" $root }}
automountServiceAccountToken: false
# Kiln does not use the variables of Services, and variables of a Service named kiln-bridge would look like settings.
enableServiceLinks: false
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with $part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kiln.claim" -}}
- metadata: {name: state}
  spec:
    accessModes: [ReadWriteOnce]
    {{- with .storageClass }}
    storageClassName: {{ . }}
    {{- end }}
    resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* Fails if the pods of the queries share no storage, because they need a common lake. A driver of spark-applications
     also needs storage for its checkpoints, because it gets an empty volume at each start. */}}
{{- define "kiln.sharedStorage" -}}
{{- $jobs := .Values.jobs -}}
{{- if and $jobs.enabled (ne $jobs.as "together") (not $jobs.volume.existingClaim) -}}
{{- $values := .Values -}}
{{- range $part := ternary (list "lake") (list "lake" "checkpoints") (eq $jobs.as "pods") -}}
{{- $inStore := hasPrefix "s3://" (dig $part "uri" "" $values.settings) -}}
{{- if not (or $inStore (hasKey $values.secrets (printf "KILN_%s__URI" (upper $part)))) -}}
{{- fail (printf "jobs.as=%s runs each query in pods of its own, and they share no storage. Set settings.%s.uri to a path in an object store, such as s3://BUCKET/%s, or jobs.volume.existingClaim to a volume that all pods can write at once." $jobs.as $part $part) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Fails if the settings name no network for the bridge, or no peers. */}}
{{- define "kiln.hasNetwork" -}}
{{- if .Values.bridge.enabled -}}
{{- if not (or (dig "network" "name" "" .Values.settings) (hasKey .Values.secrets "KILN_NETWORK")) -}}
{{- fail "settings.network.name is missing: name the network that the bridge joins, such as mainnet (NAME in its topics /ceramic/NAME)." -}}
{{- end -}}
{{- $overlay := dig "bep50" "enabled" false .Values.settings -}}
{{- if not (or (dig "bridge" "bootstrap" list .Values.settings) (hasKey .Values.secrets "KILN_BRIDGE__BOOTSTRAP") $overlay) -}}
{{- fail "settings.bridge.bootstrap is empty, so the bridge would find no peers: list some peers of the network, such as /ip4/192.0.2.7/tcp/4001/p2p/12D3KooW…, or set bridge.enabled=false." -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Ports that the jobs may reach: networkPolicy.jobsTo, and the ports of the brokers and of the object store. */}}
{{- define "kiln.jobsPorts" -}}
{{- $ports := list -}}
{{- range .Values.networkPolicy.jobsTo }}{{ $ports = append $ports (int .) }}{{ end -}}
{{- range splitList "," .Values.settings.kafka.bootstrap }}{{ $ports = append $ports (regexFind "[0-9]+$" (trim .) | int) }}{{ end -}}
{{- range $key, $value := dig "lake" "storage_options" dict .Values.settings -}}
{{- if contains "endpoint" (lower $key) -}}
{{- $url := urlParse $value -}}
{{- $port := regexFind ":[0-9]+$" $url.host | trimPrefix ":" -}}
{{- $ports = append $ports ($port | default (ternary "80" "443" (eq $url.scheme "http")) | int) -}}
{{- end -}}
{{- end -}}
{{- $ports | uniq | toJson -}}
{{- end }}

{{- define "kiln.jobsEgress" -}}
- ports: [{protocol: UDP, port: 53}, {protocol: TCP, port: 53}]
- ports:
    {{- range include "kiln.jobsPorts" . | fromJsonArray }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end }}

{{- define "kiln.volumes" -}}
- {name: settings, configMap: {name: {{ include "kiln.name" . }}-settings}}
{{- with .Values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "kiln.mounts" -}}
- {name: state, mountPath: /var/lib/kiln}
- {name: settings, mountPath: /etc/kiln, readOnly: true}
- {name: scratch, mountPath: /tmp}
{{- with .Values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Pod template for the Spark operator. Context: name of Spark's container. */}}
{{- define "kiln.sparkPod" -}}
spec:
  enableServiceLinks: false
  # Spark adds its settings to the first container of a template.
  containers:
    - name: {{ . }}
{{- end }}

{{- define "kiln.checksum" -}}
checksum/settings: {{ toToml .Values.settings | sha256sum }}
{{- end }}
