{{- define "graftwork.labels" -}}
app.kubernetes.io/name: graftwork
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "graftwork.image" -}}
{{ .Values.image.repository }}{{ with .Values.image.digest }}@{{ . }}{{ else }}:{{ .Values.image.tag | default .Chart.AppVersion }}{{ end }}
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

{{/* What every process but an engine reads as its settings. */}}
{{- define "graftwork.params" -}}
{{- $elsewhere := include "graftwork.elsewhere" . | fromYaml }}
{{- $shared := mustMergeOverwrite (deepCopy .Values.settings) $elsewhere }}
{{- $_ := set $shared "engine" (mergeOverwrite (deepCopy (default dict .Values.settings.engine)) (get $elsewhere "engine")) }}
{{- toYaml $shared }}
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

{{- define "graftwork.claim" -}}
accessModes: [ReadWriteOncePod]
{{- with .root.Values.storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* The pod of a Job: one command of ours, with these settings and this state. */}}
{{- define "graftwork.job" -}}
metadata:
  labels: {{- include "graftwork.labels" . | nindent 4 }}
spec:
  restartPolicy: Never
  securityContext: {{ include "graftwork.security" .root }}
  automountServiceAccountToken: false
  containers:
    - name: {{ .component }}
      image: {{ include "graftwork.image" .root }}
      imagePullPolicy: {{ .root.Values.image.pullPolicy }}
      command: {{ toJson .command }}
      env: {{- include "graftwork.environment" .root | nindent 8 }}
      resources: {{- toYaml .root.Values.jobs.resources | nindent 8 }}
      securityContext: {{ include "graftwork.confined" .root }}
      volumeMounts:
        {{- include "graftwork.mounts" .root | nindent 8 }}
        {{- if eq .component "restore" }}{{ include "graftwork.backupMount" .root | nindent 8 }}{{ end }}
  volumes:
    - {name: settings, configMap: {name: {{ .settings }}}}
    {{- include "graftwork.passing" .root | nindent 4 }}
    - {{ toJson (merge (dict "name" "state") .state) }}
    {{- if eq .component "restore" }}{{ include "graftwork.backupVolume" .root | nindent 4 }}{{ end }}
{{- end }}

{{- define "graftwork.backupMount" -}}
{{- if .Values.backup.claim }}
- {name: backup, mountPath: /backup}
{{- end }}
{{- end }}

{{- define "graftwork.backupVolume" -}}
{{- with .Values.backup.claim }}
- {name: backup, persistentVolumeClaim: {claimName: {{ . }}}}
{{- end }}
{{- end }}

{{- define "graftwork.passing" -}}
- {name: scratch, emptyDir: {}}
- {name: memory, emptyDir: {medium: Memory}}
{{- end }}

{{- define "graftwork.volumes" -}}
- {name: settings, configMap: {name: {{ .Release.Name }}-settings}}
{{ include "graftwork.passing" . }}
{{- end }}
