{{- define "pdmesh.name" -}}
{{- $name := default .Release.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "nameOverride: %s cannot begin the names of Services; give one of a-z, 0-9 and -, with a letter first" $name) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{/* What the names of priority classes begin with. */}}
{{- define "pdmesh.priorities" -}}
{{- .Values.priorityClasses.name | default (include "pdmesh.name" .) -}}
{{- end -}}

{{/* Labels of an object: dict root, app ("router"), component ("" or "worker"). */}}
{{- define "pdmesh.labels" -}}
app.kubernetes.io/name: {{ include "pdmesh.name" .root }}-{{ .app }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
app.kubernetes.io/part-of: pdmesh
{{- end -}}

{{- define "pdmesh.selector" -}}
app.kubernetes.io/name: {{ include "pdmesh.name" .root }}-{{ .app }}
{{- end -}}

{{/* An image of our own, which has the registry and the chart's version: dict root, image. */}}
{{- define "pdmesh.image" -}}
{{- $images := .root.Values.images -}}
{{- with $images.registry }}{{ . }}/{{ end -}}
{{ .image.repository }}
{{- if .image.digest }}@{{ .image.digest }}{{ else }}:{{ .image.tag | default $images.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end -}}

{{- define "pdmesh.otherImage" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}

{{- define "pdmesh.secret" -}}
{{- $known := dict "redis" .root.Values.secrets.redis "mesh-secret" .root.Values.secrets.mesh "api-keys" .root.Values.secrets.apiKeys "autoscaler" .root.Values.secrets.autoscaler "tls" .root.Values.tls.secret -}}
{{- get $known .name | default (printf "%s-%s" (include "pdmesh.name" .root) .name) -}}
{{- end -}}

{{- define "pdmesh.otlpEndpoint" -}}
{{- .Values.tracing.endpoint | default (printf "%s-jaeger:4317" (include "pdmesh.name" .)) -}}
{{- end -}}

{{/* Settings as variables, a map: dict own, given (which win). */}}
{{- define "pdmesh.env" -}}
{{- range $name, $value := mergeOverwrite (deepCopy .own) .given }}
- name: {{ $name }}
  value: {{ $value | quote }}
{{- end }}
{{- end -}}

{{/* Reasons for deviations from a linter's rules. */}}
{{- define "pdmesh.skips" -}}
checkov.io/skip1: CKV_K8S_43=The tag is set where the image is built; to use a digest, write it into images of the kustomization or of the values
checkov.io/skip2: CKV_K8S_15=Tags are not used twice, and images that were loaded onto a node (kind) are in no registry
{{- end -}}

{{/* What all pods have in common: dict root, account, priority, grace, policy (of fsGroup), token. */}}
{{- define "pdmesh.pod" -}}
serviceAccountName: {{ include "pdmesh.name" .root }}-{{ .account }}
automountServiceAccountToken: {{ .token | default false }}
# Otherwise Kubernetes would set variables with the prefix of our settings.
enableServiceLinks: false
priorityClassName: {{ include "pdmesh.priorities" .root }}-{{ .priority }}
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  {{- if .policy }}
  fsGroupChangePolicy: OnRootMismatch
  {{- end }}
  seccompProfile:
    type: RuntimeDefault
{{- with .root.Values.images.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "pdmesh.spread" -}}
topologySpreadConstraints:
  {{- range list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "pdmesh.selector" $ | nindent 8 }}
  {{- end }}
{{- end -}}

{{- define "pdmesh.confined" -}}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: ["ALL"]
{{- end -}}

{{/* How a port of gRPC is probed: dict root, port (its number), service (or ""). The kubelet's gRPC probes are of 1.24, and do not
speak TLS: then they check that the port is open. */}}
{{- define "pdmesh.probe" -}}
{{- if and (not .root.Values.tls.enabled) (semverCompare ">=1.24-0" .root.Capabilities.KubeVersion.Version) -}}
grpc:
  port: {{ .port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- else -}}
tcpSocket:
  port: grpc
{{- end -}}
{{- end -}}

{{- define "pdmesh.disruptionBudgetVersion" -}}
{{- if semverCompare ">=1.21-0" .Capabilities.KubeVersion.Version }}policy/v1{{ else }}policy/v1beta1{{ end -}}
{{- end -}}

{{/* A volume of one Secret's key: dict root, name (of the volume), secret, key. */}}
{{- define "pdmesh.secretVolume" -}}
- name: {{ .name }}
  secret:
    secretName: {{ include "pdmesh.secret" (dict "root" .root "name" .secret) }}
    defaultMode: 0440
    {{- with .key }}
    items:
      - key: {{ . }}
        path: {{ . }}
    {{- end }}
{{- end -}}

{{- define "pdmesh.tlsEnv" -}}
{{- if .Values.tls.enabled }}
- name: PDMESH_TLS_CERT
  value: /etc/pdmesh/tls/tls.crt
- name: PDMESH_TLS_KEY
  value: /etc/pdmesh/tls/tls.key
- name: PDMESH_TLS_CA
  value: /etc/pdmesh/tls/ca.crt
{{- end }}
{{- end -}}

{{- define "pdmesh.tlsMount" -}}
{{- if .Values.tls.enabled }}
- name: tls
  mountPath: /etc/pdmesh/tls
  readOnly: true
{{- end }}
{{- end -}}

{{- define "pdmesh.tlsVolume" -}}
{{- if .Values.tls.enabled }}
{{ include "pdmesh.secretVolume" (dict "root" . "name" "tls" "secret" "tls") }}
{{- end }}
{{- end -}}

{{/* The model's folder, copied from its image: dict root, command, size. */}}
{{- define "pdmesh.modelContainer" -}}
{{- if not .root.Values.model.claim }}
initContainers:
  - name: model
    image: {{ include "pdmesh.image" (dict "root" .root "image" .root.Values.model.image) }}
    imagePullPolicy: {{ .root.Values.images.pullPolicy }}
    command: {{ .command | toJson }}
    resources:
      requests: {cpu: 100m, memory: 128Mi}
      limits: {cpu: "1", memory: 256Mi}
    {{- include "pdmesh.confined" . | nindent 4 }}
    volumeMounts:
      - name: models
        mountPath: /models
{{- end }}
{{- end -}}

{{- define "pdmesh.modelVolume" -}}
- name: models
  {{- if .root.Values.model.claim }}
  persistentVolumeClaim:
    claimName: {{ .root.Values.model.claim }}
    readOnly: true
  {{- else }}
  emptyDir:
    sizeLimit: {{ .size }}
  {{- end }}
{{- end -}}

{{/* One table of the objectives. */}}
{{- define "pdmesh.bounds" -}}
{{- range list "ttft_ms" "tpot_ms" }}
{{- if hasKey $ . }}
{{ . }} = {{ get $ . | int }}
{{- end }}
{{- end -}}
{{- if hasKey . "quantile" }}
quantile = {{ .quantile }}
{{- end }}
{{- end -}}
