{{/*
Completes .Values in place, so that templates find each of them. Helm takes a key away if its value is null, leaves null
where values.yaml has no such key, and with --reuse-values has the keys of the older chart. Every template begins with it.
*/}}
{{- define "gpu-dra-driver.complete" -}}
{{- $file := .Files.Get "files/defaults.json" | fromJson -}}
{{- include "gpu-dra-driver.completed" (list .Values $file.defaults $file.nothing "") -}}
{{- end }}

{{/* (list VALUES DEFAULTS PATHS PREFIX): skips the keys at PATHS, which all begin with PREFIX. */}}
{{- define "gpu-dra-driver.completed" -}}
{{- $values := index . 0 -}}{{- $defaults := index . 1 -}}{{- $nothing := index . 2 -}}{{- $prefix := index . 3 -}}
{{- range $key, $value := $values -}}
{{- if kindIs "invalid" $value -}}{{- $_ := unset $values $key -}}{{- end -}}
{{- end -}}
{{- range $key, $default := $defaults -}}
{{- if and (not (hasKey $values $key)) (not (has (print $prefix $key) $nothing)) -}}
{{- $_ := set $values $key (deepCopy $default) -}}
{{- end -}}
{{- end -}}
{{- range $key, $value := $values -}}
{{- if kindIs "map" $value -}}
{{- $path := print $prefix $key -}}
{{- $below := ternary dict (get $defaults $key | default dict) (has $path $nothing) -}}
{{- include "gpu-dra-driver.completed" (list $value $below $nothing (print $path ".")) -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "gpu-dra-driver.name" -}}
{{ default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* The name of the DaemonSet, at most 63 characters. */}}
{{- define "gpu-dra-driver.fullname" -}}
{{- $name := include "gpu-dra-driver.name" . -}}
{{- if .Values.fullnameOverride -}}
{{ .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else if contains $name .Release.Name -}}
{{ .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else -}}
{{ printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end -}}
{{- end }}

{{/* The name of another object: (list . "mps") is FULLNAME-mps, at most 63 characters. */}}
{{- define "gpu-dra-driver.nameOf" -}}
{{- $suffix := printf "-%s" (index . 1) -}}
{{ include "gpu-dra-driver.fullname" (index . 0) | trunc (int (sub 63 (len $suffix))) | trimSuffix "-" }}{{ $suffix }}
{{- end }}

{{- define "gpu-dra-driver.namespace" -}}
{{ default .Release.Namespace .Values.namespaceOverride }}
{{- end }}

{{- define "gpu-dra-driver.serviceAccountName" -}}
{{ default (include "gpu-dra-driver.fullname" .) .Values.serviceAccount.name }}
{{- end }}

{{- define "gpu-dra-driver.image" -}}
{{ .Values.image.repository }}{{ if not (contains "@" .Values.image.repository) }}:{{ default .Chart.AppVersion .Values.image.tag }}{{ end }}
{{- end }}

{{/* The labels of every object. */}}
{{- define "gpu-dra-driver.labels" -}}
app.kubernetes.io/name: {{ include "gpu-dra-driver.name" . | toYaml }}
app.kubernetes.io/part-of: gpu-dra-driver
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/*
By what pods of the plugin are found. A DaemonSet's selector cannot be changed: a release with the name of the chart
has the selector of daemonset/install.yaml, and any other one is told apart by its name.
*/}}
{{- define "gpu-dra-driver.selectorLabels" -}}
{{- if .Values.selectorLabelsOverride -}}
{{ toYaml .Values.selectorLabelsOverride }}
{{- else -}}
app.kubernetes.io/name: {{ include "gpu-dra-driver.name" . | toYaml }}
{{- if ne .Release.Name (include "gpu-dra-driver.name" .) }}
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end }}
{{- end }}
{{- end }}

{{- define "gpu-dra-driver.hostRoot" -}}
{{- $roots := dict "host" "/" "gpu-operator" "/run/nvidia/driver" "gke" "/home/kubernetes/bin/nvidia" -}}
{{- if .Values.driverRootPreset -}}
{{ get $roots .Values.driverRootPreset }}
{{- else -}}
{{ .Values.nvidiaDriverRoot | trimSuffix "/" | default "/" }}
{{- end -}}
{{- end }}

{{- define "gpu-dra-driver.registry" -}}
{{ default (printf "%s/plugins_registry" .Values.kubeletDirectory) .Values.kubeletPlugin.kubeletRegistrarDirectoryPath }}
{{- end }}

{{- define "gpu-dra-driver.plugins" -}}
{{ default (printf "%s/plugins" .Values.kubeletDirectory) .Values.kubeletPlugin.kubeletPluginsDirectoryPath }}
{{- end }}

{{- define "gpu-dra-driver.port" -}}
{{ .Values.kubeletPlugin.metrics.gpuHttpEndpoint | splitList ":" | last }}
{{- end }}

{{/* Each is "true" or "": MIG devices on demand, GPUs for virtual machines, the MPS host, shared devices. */}}
{{- define "gpu-dra-driver.dynamicMig" -}}
{{- if or .Values.dynamicMig.enabled .Values.featureGates.DynamicMIG -}}true{{- end -}}
{{- end }}
{{- define "gpu-dra-driver.passthrough" -}}
{{- if or .Values.passthrough.enabled .Values.featureGates.PassthroughSupport -}}true{{- end -}}
{{- end }}
{{- define "gpu-dra-driver.mps" -}}
{{- if or .Values.mps.enabled .Values.featureGates.MPSSupport -}}true{{- end -}}
{{- end }}
{{- define "gpu-dra-driver.consumableShares" -}}
{{- if not (has (toString .Values.consumableShares) (list "" "disabled")) -}}{{ .Values.consumableShares }}{{- end -}}
{{- end }}
{{- define "gpu-dra-driver.shares" -}}
{{- if or .Values.sharing (include "gpu-dra-driver.consumableShares" .) -}}true{{- end -}}
{{- end }}

{{/* The plugin's configuration file, or nothing. */}}
{{- define "gpu-dra-driver.configFile" -}}
{{- $file := deepCopy .Values.config -}}
{{- with .Values.sharing }}{{ $_ := set $file "sharing" . }}{{ end -}}
{{- with .Values.health }}{{ $_ := set $file "health" . }}{{ end -}}
{{- with .Values.migLayouts }}{{ $_ := set $file "migLayouts" . }}{{ end -}}
{{- with .Values.power }}{{ $_ := set $file "power" . }}{{ end -}}
{{- if include "gpu-dra-driver.dynamicMig" . -}}
{{- with .Values.dynamicMig.gpus }}{{ $_ := set $file "dynamicMig" (dict "enabled" true "gpus" .) }}{{ end -}}
{{- end -}}
{{- if include "gpu-dra-driver.passthrough" . -}}
{{- with .Values.passthrough.gpus }}{{ $_ := set $file "passthrough" (dict "enabled" true "gpus" .) }}{{ end -}}
{{- end -}}
{{- if $file }}{{ toYaml $file }}{{ end -}}
{{- end }}

{{- define "gpu-dra-driver.resourceApiVersion" -}}
{{- $found := .Values.resourceApiVersion -}}
{{- range list "resource.k8s.io/v1" "resource.k8s.io/v1beta2" "resource.k8s.io/v1beta1" -}}
{{- if and (not $found) ($.Capabilities.APIVersions.Has .) -}}{{- $found = . -}}{{- end -}}
{{- end -}}
{{ $found }}
{{- end }}

{{/* The nodes on which both DaemonSets run. */}}
{{- define "gpu-dra-driver.nodes" -}}
nodeSelector:
  kubernetes.io/os: linux
  {{- if .Values.driverUpgrades.enabled }}
  nvidia.com/gpu.deploy.dra-driver: "true"
  {{- end }}
  {{- with omit .Values.kubeletPlugin.nodeSelector "kubernetes.io/os" }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
tolerations:
  # The kubelet needs the plugin to end pods, including pods that such a taint evicts.
  - operator: Exists
    effect: NoExecute
{{- range .Values.kubeletPlugin.tolerations }}
  {{- toYaml (list .) | nindent 2 }}
{{- end }}
{{- $affinity := deepCopy .Values.kubeletPlugin.affinity -}}
{{- if include "gpu-dra-driver.gpuNodesOnly" . -}}
{{- $terms := include "gpu-dra-driver.gpuNodes" . | fromYamlArray -}}
{{- $required := dict "requiredDuringSchedulingIgnoredDuringExecution" (dict "nodeSelectorTerms" $terms) -}}
{{- $affinity = mergeOverwrite $affinity (dict "nodeAffinity" $required) -}}
{{- end -}}
{{- with $affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* "true" or "": whether a node needs a GPU node label. */}}
{{- define "gpu-dra-driver.gpuNodesOnly" -}}
{{- $own := dig "nodeAffinity" "requiredDuringSchedulingIgnoredDuringExecution" "" .Values.kubeletPlugin.affinity -}}
{{- if and .Values.kubeletPlugin.gpuNodesOnly (not .Values.simulator.enabled) (not $own) -}}true{{- end -}}
{{- end }}

{{/* GPU node labels: a node with one of them has NVIDIA GPUs. */}}
{{- define "gpu-dra-driver.gpuNodes" -}}
{{- range $key, $values := dict
  "nvidia.com/gpu.present" (list "true")
  "feature.node.kubernetes.io/pci-10de.present" (list "true")
  "feature.node.kubernetes.io/pci-0300_10de.present" (list "true")
  "feature.node.kubernetes.io/pci-0302_10de.present" (list "true")
  "feature.node.kubernetes.io/cpu-model.vendor_id" (list "NVIDIA")
  "karpenter.k8s.aws/instance-gpu-manufacturer" (list "nvidia")
  "eks.amazonaws.com/instance-gpu-manufacturer" (list "nvidia")
  "kubernetes.azure.com/accelerator" (list "nvidia") }}
- matchExpressions: [{key: {{ $key }}, operator: In, values: {{ toJson $values }}}]
{{- end }}
{{- range list "cloud.google.com/gke-accelerator" "k8s.amazonaws.com/accelerator" }}
- matchExpressions: [{key: {{ . }}, operator: Exists}]
{{- end }}
{{- end }}

{{/* (list PATH VALUE DEFAULT): a line for each leaf of VALUE that differs from DEFAULT. */}}
{{- define "gpu-dra-driver.differences" -}}
{{- $path := index . 0 -}}{{- $value := index . 1 -}}{{- $default := index . 2 -}}
{{- if and (kindIs "map" $value) (kindIs "map" $default) -}}
{{- range $key, $below := $value -}}
{{- include "gpu-dra-driver.differences" (list (printf "%s.%s" $path $key) $below (get $default $key)) -}}
{{- end -}}
{{- else if ne (toJson $value) (toJson $default) -}}
{{ $path }}{{ "\n" }}
{{- end -}}
{{- end }}
