{{/*
Names, labels and parts of several templates, and the checks of combined values.
*/}}

{{- define "nvshare.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "nvshare.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- $name := include "nvshare.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 40 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{/* Name of a DaemonSet and its ConfigMap, of one group of nodes or of all others. */}}
{{- define "nvshare.nodeName" -}}
{{- include "nvshare.fullname" . }}{{ with dig "name" "" (default dict .group) }}-node-{{ . }}{{ end }}
{{- end }}

{{- define "nvshare.nodeComponent" -}}
node{{ with dig "name" "" .group }}-{{ . }}{{ end }}
{{- end }}

{{/* The values of a group of nodes: (list root group). */}}
{{- define "nvshare.groupValues" -}}
{{- $root := first . }}
{{- toYaml (mergeOverwrite (deepCopy $root.Values) (omit (last . | deepCopy) "name" "label" "values")) }}
{{- end }}

{{/* The affinity of a group of nodes.  A node belongs to the first group that names it. */}}
{{- define "nvshare.affinity" -}}
{{- $affinity := deepCopy (default dict .Values.affinity) }}
{{- $own := list }}
{{- range $before, $group := .Values.nodeGroups }}
{{- if or (eq $.index 0) (lt (add1 $before) $.index) }}
{{- $own = append $own (dict "key" $group.label "operator" "NotIn" "values" $group.values) }}
{{- else if eq (add1 $before) $.index }}
{{- $own = append $own (dict "key" $group.label "operator" "In" "values" $group.values) }}
{{- end }}
{{- end }}
{{- if $own }}
{{- $key := "requiredDuringSchedulingIgnoredDuringExecution" }}
{{- $terms := list }}
{{- range default (list dict) (dig "nodeAffinity" $key "nodeSelectorTerms" list $affinity) }}
{{- $terms = append $terms (set (deepCopy .) "matchExpressions" (concat (default list .matchExpressions) $own)) }}
{{- end }}
{{- $affinity = mergeOverwrite $affinity (dict "nodeAffinity" (dict $key (dict "nodeSelectorTerms" $terms))) }}
{{- end }}
{{- with $affinity }}{{ toYaml . }}{{ end }}
{{- end }}

{{- define "nvshare.metricsArguments" -}}
{{- if .Values.metrics.tlsSecret -}}
- --metrics-tls-dir=/etc/nvshare-metrics/tls
{{- end }}
{{- end }}

{{- define "nvshare.metricsMounts" -}}
{{- if .Values.metrics.tlsSecret -}}
- name: metrics-tls
  mountPath: /etc/nvshare-metrics/tls
  readOnly: true
{{- end }}
{{- end }}

{{- define "nvshare.metricsVolumes" -}}
{{- with .Values.metrics.tlsSecret -}}
- name: metrics-tls
  secret:
    secretName: {{ . }}
{{- end }}
{{- end }}

{{- define "nvshare.namespace" -}}
{{- default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- define "nvshare.selectorLabels" -}}
app.kubernetes.io/name: {{ include "nvshare.name" . | quote }}
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "nvshare.labels" -}}
{{ include "nvshare.selectorLabels" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | quote }}
{{- end }}

{{/* As in other charts, a global registry wins: it is a mirror of all. */}}
{{- define "nvshare.registry" -}}
{{- default .Values.image.registry .Values.global.imageRegistry }}
{{- end }}

{{- define "nvshare.image" -}}
{{- $image := .Values.image }}
{{- $name := $image.repository }}
{{- with include "nvshare.registry" . }}{{ $name = printf "%s/%s" (. | trimSuffix "/") $name }}{{ end }}
{{- $name = printf "%s:%s" $name (default .Chart.AppVersion $image.tag) }}
{{- if $image.digest }}{{ $name = printf "%s@%s" $name $image.digest }}{{ end }}
{{- $name }}
{{- end }}

{{- define "nvshare.pullSecrets" -}}
{{- with concat (default list .Values.global.imagePullSecrets) .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ if kindIs "map" . }}{{ .name | quote }}{{ else }}{{ . | quote }}{{ end }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "nvshare.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "nvshare.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "nvshare.slotsDirectory" -}}
{{- printf "%s/slots" .Values.hostPaths.socketDirectory }}
{{- end }}

{{- define "nvshare.versionsDirectory" -}}
{{- printf "%s/lib" .Values.hostPaths.libraryDirectory }}
{{- end }}

{{/* Name of objects that no namespace holds. */}}
{{- define "nvshare.clusterName" -}}
{{- printf "%s-%s" (include "nvshare.namespace" .) (include "nvshare.fullname" .) | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Whether a plugin has an account's token and the rights of rbac.yaml. */}}
{{- define "nvshare.usesApi" -}}
{{- $watches := and .Values.podAnnotations.watch (eq .Values.advertise.mode "plugin") }}
{{- if or $watches .Values.nri.enabled (eq .Values.advertise.mode "dra") }}true{{ end }}
{{- end }}

{{/* The security context of the DaemonSet's containers.  Reading MIG instances needs SYS_ADMIN, which the API server
refuses together with allowPrivilegeEscalation: false. */}}
{{- define "nvshare.securityContext" -}}
{{- $context := deepCopy .Values.securityContext }}
{{- if .Values.mig.enabled }}
{{- $context = omit $context "allowPrivilegeEscalation" }}
{{- $capabilities := deepCopy (default dict $context.capabilities) }}
{{- $_ := set $capabilities "add" (append (default list $capabilities.add) "SYS_ADMIN" | uniq) }}
{{- $_ := set $context "capabilities" $capabilities }}
{{- end }}
{{- with .Values.seLinuxOptions }}
{{- $_ := set $context "seLinuxOptions" . }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{/* To park programs the coordinator calls the driver for other processes, as their user.  A JSON list. */}}
{{- define "nvshare.parkingCapabilities" -}}
{{- ternary (list "SYS_PTRACE" "SETUID" "SETGID") list .Values.parking.enabled | toJson }}
{{- end }}

{{/* The coordinator's, which also parks programs. */}}
{{- define "nvshare.coordinatorSecurityContext" -}}
{{- $context := include "nvshare.securityContext" . | fromYaml }}
{{- if .Values.parking.enabled }}
{{- $capabilities := default dict $context.capabilities }}
{{- $_ := set $capabilities "add" (concat (default list $capabilities.add) (include "nvshare.parkingCapabilities" . | fromJsonArray) | uniq) }}
{{- $_ := set $context "capabilities" $capabilities }}
{{- end }}
{{- toYaml $context }}
{{- end }}

{{/* A value of the coordinator's file: text in quotes, numbers as whole numbers (Helm reads them as floating). */}}
{{- define "nvshare.toml" -}}
{{- if kindIs "string" . }}{{ . | quote }}{{ else }}{{ int64 . }}{{ end }}
{{- end }}

{{- define "nvshare.settings" -}}
{{- $policies := concat (list "auto" "edf" "fair_share" "least_attained" "priority" "round_robin") .Values.image.policies }}
{{- range concat (list .Values.settings) (values (default dict .Values.settings.gpu)) }}
{{- if and .policy (not (has .policy $policies)) }}
{{- fail (printf "settings.policy: %s: the image has %s; name policies of your own in image.policies" .policy (join ", " $policies)) }}
{{- end }}
{{- end }}
{{- range $key, $value := omit .Values.settings "gpu" }}
{{ $key }} = {{ include "nvshare.toml" $value }}
{{- end }}
{{- range $uuid, $settings := default dict .Values.settings.gpu }}

[gpu.{{ $uuid | quote }}]
{{- range $key, $value := $settings }}
{{ $key }} = {{ include "nvshare.toml" $value }}
{{- end }}
{{- end }}
{{- end }}

{{/* Checks of combined values, which a schema cannot express.  Each message begins with the value's name. */}}
{{- define "nvshare.validate" -}}
{{- $values := .Values }}
{{- $paths := $values.hostPaths }}
{{- $image := $values.image }}
{{- if not (or (include "nvshare.registry" .) (contains "/" $image.repository) (eq $image.pullPolicy "Never")) }}
{{- fail (printf "image.registry: empty, and no public registry has image.repository: %s; name the registry that you pushed the image to, or set image.pullPolicy: Never if every node has it" $image.repository) }}
{{- end }}
{{- range $name, $path := $paths }}
{{- if or (contains "//" $path) (contains "/../" (printf "%s/" $path)) }}
{{- fail (printf "hostPaths.%s: %s: write it without // and .." $name $path) }}
{{- end }}
{{- end }}
{{- if or (hasPrefix (printf "%s/" $paths.socketDirectory) (printf "%s/" $paths.libraryDirectory)) (hasPrefix (printf "%s/" $paths.libraryDirectory) (printf "%s/" $paths.socketDirectory)) }}
{{- fail (printf "hostPaths.libraryDirectory: %s and hostPaths.socketDirectory: %s must not lie in each other" $paths.libraryDirectory $paths.socketDirectory) }}
{{- end }}
{{- if and $values.nri.enabled (ne $values.advertise.mode "external") }}
{{- fail "nri.enabled: needs advertise.mode: external, for the scheduler that gives out parts of GPUs brings its own device plugin" }}
{{- end }}
{{- if and $values.podAnnotations.watch (ne $values.advertise.mode "plugin") }}
{{- fail "podAnnotations.watch: needs advertise.mode: plugin" }}
{{- end }}
{{- range $name := list "park_after" "park_after_interactive" "park_after_best_effort" }}
{{- if and (not $values.parking.enabled) (regexMatch "[1-9]" (get $values.settings $name | toString)) }}
{{- fail (printf "settings.%s: needs parking.enabled: true, without which the coordinator can park no pod" $name) }}
{{- end }}
{{- end }}
{{- if eq (int $values.metrics.coordinatorPort) (int $values.metrics.devicePluginPort) }}
{{- fail (printf "metrics.devicePluginPort: %d is metrics.coordinatorPort too; both are ports of the same pod" (int $values.metrics.devicePluginPort)) }}
{{- end }}
{{- if and $values.metrics.serviceMonitor.enabled $values.metrics.podMonitor.enabled }}
{{- fail "metrics.podMonitor.enabled: metrics.serviceMonitor.enabled is set too, and everything would be counted twice; choose one" }}
{{- end }}
{{- if and (or $values.metrics.serviceMonitor.enabled $values.metrics.podMonitor.enabled) $values.metrics.tlsSecret (not $values.metrics.tlsConfig) }}
{{- fail "metrics.tlsConfig: metrics.tlsSecret is set: say how Prometheus checks the certificate, such as {ca: {secret: {name: NAME, key: ca.crt}}, serverName: HOST}" }}
{{- end }}
{{- if and $values.networkPolicy.enabled (not $values.networkPolicy.metricsFrom) }}
{{- fail "networkPolicy.metricsFrom: empty would let everybody in; name who may scrape, such as [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: monitoring}}}]" }}
{{- end }}
{{- range $label := list "app.kubernetes.io/name" "app.kubernetes.io/instance" "app.kubernetes.io/component" "nvshare.com/part" }}
{{- if hasKey $values.daemonPodLabels $label }}{{ fail (printf "daemonPodLabels: %s is the chart's own" $label) }}{{ end }}
{{- end }}
{{- $groups := list }}
{{- range $index, $group := $values.nodeGroups }}
{{- if has $group.name $groups }}
{{- fail (printf "nodeGroups[%d].name: %s has an entry already" $index $group.name) }}
{{- end }}
{{- $groups = append $groups $group.name }}
{{- end }}
{{- if and (not $values.rbac.create) (eq $values.advertise.mode "dra") (not $values.serviceAccount.name) }}
{{- fail "serviceAccount.name: with rbac.create: false and advertise.mode: dra, name an account that may read nodes and claims and write resource slices" }}
{{- end }}
{{- if and (not $values.rbac.create) $values.podAnnotations.watch (not $values.serviceAccount.name) }}
{{- fail "serviceAccount.name: with rbac.create: false and podAnnotations.watch: true, name an account that may watch pods" }}
{{- end }}
{{- if gt (int $values.podAnnotations.priorityRange.min) (int $values.podAnnotations.priorityRange.max) }}
{{- fail (printf "podAnnotations.priorityRange.min: %d is more than podAnnotations.priorityRange.max: %d" (int $values.podAnnotations.priorityRange.min) (int $values.podAnnotations.priorityRange.max)) }}
{{- end }}
{{- $namespaces := list }}
{{- range $index, $quota := $values.resourceQuotas }}
{{- if has $quota.namespace $namespaces }}
{{- fail (printf "resourceQuotas[%d].namespace: %s has an entry already" $index $quota.namespace) }}
{{- end }}
{{- $namespaces = append $namespaces $quota.namespace }}
{{- end }}
{{- if and (eq $values.updateStrategy.type "OnDelete") (kindIs "map" $values.updateStrategy.rollingUpdate) (ne (toYaml $values.updateStrategy.rollingUpdate) "maxUnavailable: 10%") }}
{{- fail "updateStrategy.rollingUpdate: has no meaning with updateStrategy.type: OnDelete" }}
{{- end }}
{{- end }}

{{/* Variables with which the NVIDIA runtime shows a container all GPUs of its node, for reading only. */}}
{{- define "nvshare.gpuEnv" -}}
- name: NVIDIA_VISIBLE_DEVICES
  value: all
- name: NVIDIA_DRIVER_CAPABILITIES
  value: {{ if .Values.parking.enabled }}"compute,utility"{{ else }}utility{{ end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Probes of a port: (list root port).  /livez asks the coordinator's loop; /readyz fails while it waits for a driver. */}}
{{- define "nvshare.probes" -}}
{{- $scheme := ternary "HTTPS" "HTTP" (ne (first .).Values.metrics.tlsSecret "") }}
livenessProbe:
  httpGet:
    path: /livez
    port: {{ last . }}
    scheme: {{ $scheme }}
  initialDelaySeconds: 15
  periodSeconds: 60
  timeoutSeconds: 5
  failureThreshold: 3
readinessProbe:
  httpGet:
    path: /readyz
    port: {{ last . }}
    scheme: {{ $scheme }}
  periodSeconds: 10
  timeoutSeconds: 5
{{- end }}
