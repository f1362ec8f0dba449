{{- define "tessera.labels" -}}
{{- $name := dict "app.kubernetes.io/name" .root.Chart.Name -}}
{{- $of := dict "app.kubernetes.io/instance" .root.Release.Name "app.kubernetes.io/component" .part -}}
{{ merge $name $of | toJson }}
{{- end }}

{{- define "tessera.name" -}}
{{ printf "%s-%s" (.root.Release.Name | trunc 44) .part }}
{{- end }}

{{/* Every server there may be: the gateway goes on while some are away. A gRPC connection stays with one server, so that
a service's single address would give a gateway one GPU. */}}
{{- define "tessera.servers" -}}
{{- $name := include "tessera.name" (dict "root" . "part" "server") -}}
{{- $most := ternary .Values.autoscaling.maxReplicas .Values.server.replicas .Values.autoscaling.enabled -}}
{{- range $i := until (int $most) }}{{ if $i }},{{ end }}{{ $name }}-{{ $i }}.{{ $name }}:8001{{ end }}
{{- end }}

{{/* What all pods have. Kubernetes' own variables for a service (TESSERA_SERVER_PORT, ...) would be settings that the
stages do not know and refuse. */}}
{{- define "tessera.pod" -}}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 1000
  runAsGroup: 1000
  fsGroup: 1000
  seccompProfile: { type: RuntimeDefault }
{{- with .Values.image.pullSecrets }}
imagePullSecrets: {{ toJson . }}
{{- end }}
{{- end }}

{{- define "tessera.container" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: { drop: [ALL] }
# Nobody is sent here any more when it is told to stop.
lifecycle: { preStop: { sleep: { seconds: 5 } } }
{{- end }}
