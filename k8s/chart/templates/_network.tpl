{{/* A policy: dict root, name, pods (selector of labels), ingress, egress: lists of rules, each a dict with peers (labels of pods), or
namespace (its name), and ports. */}}
{{- define "pdmesh.policy" -}}
{{- $name := include "pdmesh.name" .root -}}
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {{ $name }}-{{ .name }}
spec:
  podSelector:
    {{- if .pods }}
    matchLabels:
      {{- toYaml .pods | nindent 6 }}
    {{- else }} {}
    {{- end }}
  policyTypes: {{ .types | toJson }}
  {{- range $direction := list "ingress" "egress" }}
  {{- with get $ $direction }}
  {{ $direction }}:
    {{- range . }}
    - ports:
        {{- range .ports }}
        - port: {{ . }}
          protocol: TCP
        {{- end }}
      {{- if or .peers .namespace }}
      {{ eq $direction "ingress" | ternary "from" "to" }}:
        {{- range .peers }}
        - podSelector:
            matchLabels:
              {{- toYaml . | nindent 14 }}
        {{- end }}
        {{- with .namespace }}
        - namespaceSelector:
            matchLabels:
              kubernetes.io/metadata.name: {{ . }}
        {{- end }}
      {{- end }}
    {{- end }}
  {{- end }}
  {{- end }}
{{- end -}}
