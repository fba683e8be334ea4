{{- define "graftwork.labels" -}}
app.kubernetes.io/name: graftwork
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "graftwork.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* The addresses of the services, as every pod reaches them. Inside the cluster they are plain HTTP: */}}
{{/* the NetworkPolicies let nothing else reach them. */}}
{{- define "graftwork.elsewhere" -}}
network: {hosts: ["{{ .Release.Name }}-controller", "{{ .Release.Name }}-trainer"], behind_proxy: true}
controller: {at: "http://{{ .Release.Name }}-controller:8462", listen: 0.0.0.0}
mlflow: {at: {{ .Values.mlflow | quote }}}
prefect: {at: {{ .Values.prefect | quote }}}
trainer: {at: "http://{{ .Release.Name }}-trainer:8461", listen: 0.0.0.0}
engine: {at: "http://{{ .Release.Name }}-haproxy:8469"}
gateway: {proxy_sets_id: true}
state_dir: /var/lib/graftwork
{{- end }}

{{- define "graftwork.environment" -}}
- {name: HOME, value: /var/lib/graftwork}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- range list "PGPASSWORD" "AWS_ACCESS_KEY_ID" "AWS_SECRET_ACCESS_KEY" }}
- {name: {{ . }}, valueFrom: {secretKeyRef: {name: {{ $.Values.secret }}, key: {{ . }}, optional: true}}}
{{- end }}
{{- end }}

{{- define "graftwork.security" -}}
{runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
{{- end }}

{{- define "graftwork.confined" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{- define "graftwork.mounts" -}}
- {name: settings, mountPath: /etc/graftwork, readOnly: true}
- {name: state, mountPath: /var/lib/graftwork}
- {name: scratch, mountPath: /tmp}
- {name: memory, mountPath: /dev/shm}
{{- end }}

{{- define "graftwork.volumes" -}}
- {name: settings, configMap: {name: {{ .Release.Name }}-settings}}
- {name: scratch, emptyDir: {}}
- {name: memory, emptyDir: {medium: Memory}}
{{- end }}
